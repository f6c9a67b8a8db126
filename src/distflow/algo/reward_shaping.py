"""Penalties that are added to scores."""

import torch
from torch import Tensor

from distflow.errors import ConfigError


def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Returns 0 up to limit − buffer tokens, from there linearly down to −factor at the limit and beyond: [samples].

    This is DAPO's soft overlong punishment (arXiv 2503.14476). Without a buffer it is −factor from the limit on.
    """
    if not 0 <= buffer <= limit:
        raise ConfigError(f"the overlong penalty has buffer = {buffer}; it must be within 0 … {limit}, its limit")
    if not factor >= 0:
        raise ConfigError(f"the overlong penalty has factor = {factor}; it must be 0 or more, as it is subtracted")
    excess = lengths.double() - (limit - buffer)
    share = (excess / buffer).clamp(0, 1) if buffer else (excess >= 0).double()
    return (-factor * share).to(torch.get_default_dtype())
