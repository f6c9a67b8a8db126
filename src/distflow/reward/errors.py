"""What is wrong with a reward."""

from distflow.errors import DistflowError


class RewardError(DistflowError):
    """A reward function does not load, does not fit the data, or failed on a sample."""
