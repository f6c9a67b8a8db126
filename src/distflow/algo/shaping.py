"""What is added to scores for other reasons than what a response says."""

import torch
from torch import Tensor

from distflow.errors import ConfigError


def overlong(lengths: Tensor, limit: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """[samples] float: 0 up to limit − buffer tokens, from there linearly down to −penalty at the limit and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476). Without a buffer it is −penalty from the limit on.
    """
    if not 0 <= buffer <= limit:
        raise ConfigError(f"the overlong penalty has buffer = {buffer}; it must be within 0 … {limit}, its limit")
    if not penalty >= 0:
        raise ConfigError(f"the overlong penalty has penalty = {penalty}; it must be 0 or more: it is subtracted")
    beyond = lengths.double() - (limit - buffer)
    share = (beyond / buffer).clamp(0, 1) if buffer else (beyond >= 0).double()
    return (-penalty * share).to(torch.get_default_dtype())
