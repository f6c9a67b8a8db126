"""The weights of a rollout engine: plain tensors, filled in place by the weight sync, released while others train."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.cpu import prefers_transposed
from distflow.model.llama_family import fused_weights
from distflow.weights.shards import Shards, TensorSpec


class WeightBuffers:
    """This rank's part of the weights of `model`, which are no DTensors and have no hooks."""

    def __init__(
        self,
        model: PreTrainedModel,
        specs: Sequence[TensorSpec],
        shards: Shards,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.specs, self.shards, self.rank = model, specs, shards, rank
        self.dtype, self.device = dtype, device

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes these very tensors the model's weights."""
        for name, tensor in tensors.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))
        self.model.tie_weights()

    def allocate(self) -> dict[str, Tensor]:
        """Makes new memory the model's weights, and returns it to be filled."""
        shapes = {s.name: tuple(hi - lo for lo, hi in self.shards.box(s, self.rank)) for s in self.specs}
        tensors = empty_weights(shapes, fused_weights(self.model), self.dtype, self.device)
        self.use(tensors)
        return tensors

    def release(self) -> None:
        self.use({spec.name: torch.empty(0, dtype=self.dtype) for spec in self.specs})


def empty_weights(
    shapes: Mapping[str, tuple[int, ...]], fused: Iterable[Sequence[str]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Allocates parameters; matrices that are `fused` lie side by side."""
    tensors: dict[str, Tensor] = {}
    for names in fused:
        rows, width = [shapes[n][0] for n in names], shapes[names[0]][1]
        if prefers_transposed(dtype, device):
            whole = torch.empty(width, sum(rows), dtype=dtype).T
        else:
            whole = torch.empty(sum(rows), width, dtype=dtype, device=device)
        tensors |= {name: whole[end - n : end] for name, n, end in zip(names, rows, accumulate(rows), strict=True)}
    alone = {n: torch.empty(shape, dtype=dtype, device=device) for n, shape in shapes.items() if n not in tensors}
    return tensors | alone
