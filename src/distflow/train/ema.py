"""An exponential moving average of the trained weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """Averages of this rank's shards: at each update, average ← decay · average + (1 − decay) · weights."""

    def __init__(self, decay: float, weights: Mapping[str, Tensor]) -> None:
        """`weights`: parameter → this rank's shard, which the optimiser changes in place."""
        self.decay, self._weights = decay, list(weights.values())
        self.shards = {name: shard.detach().clone() for name, shard in weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.shards.values()), self._weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the average into the weights, and restores the weights at the end, to the bit."""
        averages = list(self.shards.values())
        _swap(self._weights, averages)
        try:
            yield
        finally:
            _swap(self._weights, averages)


@torch.no_grad()
def _swap(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Exchanges contents, one tensor after the other: the extra memory is the size of the largest."""
    for x, y in zip(a, b, strict=True):
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
