"""The version of DistFlow: written here, and read from here by the build."""

VERSION = "0.2.0"
