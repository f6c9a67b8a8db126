"""The error class of rewards."""

from distflow.errors import DistflowError


class RewardError(DistflowError):
    """A reward function does not load, does not fit the data, or failed on a sample."""
