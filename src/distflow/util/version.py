"""The version of DistFlow: written here, and read from here by the build."""

__version__ = "0.2.0"
