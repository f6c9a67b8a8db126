"""The state of an optimiser as checkpoints have it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.weights.shards import Shards, TensorSpec


@dataclass(frozen=True)
class Moment:
    """A tensor that an optimiser keeps of a parameter. `spec` has the parameter's name and the tensor's whole shape."""

    spec: TensorSpec
    cut: bool = True  # as the parameter is; otherwise every rank has all of it
    dtype: torch.dtype = torch.float32

    def zeros(self, shards: Shards, rank: int, device: torch.device) -> Tensor:
        """Returns this rank's part, as it is before the first step."""
        shape = [hi - lo for lo, hi in shards.box(self.spec, rank)] if self.cut else self.spec.shape
        return torch.zeros(shape, dtype=self.dtype, device=device)
