"""Muon: momentum of whole matrices, made orthogonal, for parameters that are sharded; AdamW for all others."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.train import fsdp
from distflow.weights.shards import Shards, TensorSpec

MOMENTUM = 0.95
MUON_MOMENTS, ADAMW_MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
_COEFFICIENTS, _ITERATIONS, _EPS = (3.4445, -4.775, 2.0315), 5, 1e-7  # of the Newton-Schulz iteration


def is_matrix(spec: TensorSpec) -> bool:
    """Returns whether a parameter is a matrix, or several stacked, of which each is made orthogonal."""
    return len(spec.shape) > 1 and min(spec.shape[-2:]) > 1


class Muon(torch.optim.AdamW):
    """Groups with `muon` have Muon's step (Nesterov momentum, as torch.optim.Muon), the others AdamW's.

    An orthogonal update is scaled to the root mean square of AdamW's (arXiv 2502.16982), so that both have one learning
    rate and one weight decay. `exchange` turns shards of updates into shards of the whole matrices' results.

    Like fused AdamW it divides gradients by `grad_scale`, and does nothing if `found_inf` is 1: numbers on the device.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: Any, exchange: "MatrixExchange", **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self.exchange = exchange

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        self.param_groups = [g for g in groups if not g.get("muon")]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("muon"):
                self._step(group)

    def _step(self, group: Mapping[str, Any]) -> None:
        updates: dict[str, Tensor] = {}
        done: Any = 1.0 if self.found_inf is None else 1 - self.found_inf
        shards: dict[str, Tensor] = dict(zip(group["names"], group["params"], strict=True))
        for name, p in shards.items():
            state, grad = self.state[p], torch.zeros_like(p) if p.grad is None else p.grad
            if not state:
                state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(p)}
            state["step"] += 1
            if self.grad_scale is not None:
                grad = grad / self.grad_scale
            if self.found_inf is not None:
                grad = torch.where(self.found_inf == 0, grad, 0.0)
            momentum = state["momentum_buffer"].lerp_(grad, done * (1 - MOMENTUM))
            updates[name] = grad.lerp(momentum, MOMENTUM)
        for name, update in self.exchange.apply(orthogonal, updates).items():
            rows, columns = self.exchange.specs[name].shape[-2:]
            lr = done * group["lr"]
            shards[name].mul_(1 - lr * group["weight_decay"])
            shards[name].sub_(update * (lr * 0.2 * max(rows, columns) ** 0.5))


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns about the nearest orthogonal matrix, by Newton-Schulz iterations: [..., rows, columns]."""
    a, b, c = _COEFFICIENTS
    # An accelerator multiplies fastest in 16 bits, which suffice.
    x = matrix if matrix.is_cpu else matrix.bfloat16()
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result.to(matrix.dtype)


class MatrixExchange:
    """Brings the shards of each matrix together on one rank of the sharding, and those of its result back.

    Ranks own about equally many elements. Of tensor-parallel ranks each has the whole matrices, and computes the same.
    """

    def __init__(self, specs: Sequence[TensorSpec], shards: Shards, mesh: DeviceMesh, rank: int) -> None:
        self.specs, self.shards, self.rank = {s.name: s for s in specs}, shards, rank
        self.group, self.tp = fsdp.sharding(mesh).get_group(), mesh["tp"]
        self.ranks = dist.get_process_group_ranks(self.group)
        load, self.owner = [0] * len(self.ranks), dict[str, int]()
        for spec in sorted(specs, key=lambda s: -math.prod(s.shape)):
            self.owner[spec.name] = r = load.index(min(load))
            load[r] += math.prod(spec.shape)

    def apply(self, function: Callable[[Tensor], Tensor], shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's shards of the function of each whole matrix."""
        ranks = range(len(self.ranks))
        owned = [[name for name in shards if self.owner[name] == r] for r in ranks]
        mine = owned[self.ranks.index(self.rank)]
        parts = self._send(
            [[shards[name] for name in names] for names in owned],
            [[self._shape(name, r) for name in mine] for r in ranks],
        )
        results = []
        for i, name in enumerate(mine):
            of_ranks = [part[i] for part in parts]  # cut along the first dimension
            whole = function(self._gathered(torch.cat(of_ranks), name))
            results.append(self._cut(whole, name).split([len(part) for part in of_ranks]))
        received = self._send(
            [[pieces[r] for pieces in results] for r in ranks],
            [[self._shape(name, self.ranks.index(self.rank)) for name in names] for names in owned],
        )
        return dict(zip(chain(*owned), chain(*received), strict=True))

    def _shape(self, name: str, r: int) -> list[int]:
        """Returns the shape of the shard that a rank of the sharding has."""
        return [hi - lo for lo, hi in self.shards.box(self.specs[name], self.ranks[r])]

    def _send(self, tensors: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[list[int]]]) -> list[list[Tensor]]:
        """Sends tensors to each rank of the sharding; returns those of each, whose shapes are known."""
        if len(self.ranks) == 1:
            return [list(ts) for ts in tensors]
        flat = torch.cat([t.flatten() for ts in tensors for t in ts])
        counts = [sum(math.prod(shape) for shape in of_rank) for of_rank in shapes]
        out = flat.new_empty(sum(counts))
        dist.all_to_all_single(out, flat, counts, [sum(t.numel() for t in ts) for ts in tensors], group=self.group)
        pieces = iter(out.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]

    def _gathered(self, part: Tensor, name: str) -> Tensor:
        """Returns a whole matrix from the part of this tensor-parallel rank."""
        dim = self.specs[name].tp_dim
        if dim is None or self.tp.size() == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp.size())]
        dist.all_gather(parts, part.contiguous(), group=self.tp.get_group())
        return torch.cat(parts, dim)

    def _cut(self, whole: Tensor, name: str) -> Tensor:
        """Returns the part of this tensor-parallel rank."""
        dim = self.specs[name].tp_dim
        return whole if dim is None else whole.chunk(self.tp.size(), dim)[self.tp.get_local_rank()]
