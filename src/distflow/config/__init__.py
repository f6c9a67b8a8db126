"""The configuration of a run: typed, and validated before anything is loaded. Imports no torch."""

from distflow.config.loading import load_config
from distflow.config.schema import Config

__all__ = ["Config", "load_config"]
