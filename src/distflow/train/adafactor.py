"""Adafactor: of the second moments of a matrix only the means of its rows and columns, for parameters in shards."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.train import fsdp
from distflow.train.moments import Moment
from distflow.weights.shards import Shards, TensorSpec, slices

BETA2_DECAY, EPS, LEAST_SCALE, CLIP = -0.8, torch.finfo(torch.float32).eps, 1e-3, 1.0  # of torch.optim.Adafactor


def moments_of(spec: TensorSpec) -> dict[str, Moment]:
    """Returns the moments of a parameter by name."""
    if len(spec.shape) < 2:
        return {"variance": Moment(spec)}
    shapes = {"row_var": spec.shape[:-1], "col_var": spec.shape[:-2] + spec.shape[-1:]}
    return {name: Moment(TensorSpec(spec.name, shape), cut=False) for name, shape in shapes.items()}


class Adafactor(torch.optim.Optimizer):
    """The step of torch.optim.Adafactor: an update is relative to the root mean square of its parameter.

    Groups have `specs` beside `params`, this rank's shards. Ranks add up the sums that a step needs: those of rows and
    columns, and one number for each parameter. Like fused AdamW it divides gradients by `grad_scale`, and does nothing
    if `found_inf` is 1: numbers on the device.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, groups: Sequence[dict[str, Any]], shards: Shards, mesh: DeviceMesh, rank: int, **options: Any
    ) -> None:
        super().__init__(groups, options)
        self.shards, self.rank, self.tp = shards, rank, mesh["tp"]
        self.groups = [fsdp.sharding(mesh).get_group()] + ([self.tp.get_group()] if self.tp.size() > 1 else [])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        each = [
            (spec, p, group)
            for group in self.param_groups
            for spec, p in zip(group["specs"], group["params"], strict=True)
        ]
        if not each:
            return
        done = 1.0 if self.found_inf is None else 1 - self.found_inf
        grads = [self._gradient(p) for _, p, _ in each]
        moments = [part for (spec, _, _), grad in zip(each, grads, strict=True) for part in self._sums(spec, grad)]
        squares = torch.stack([self._share(spec, p.square().sum()) for spec, p, _ in each])
        *totals, squares = self._added([*moments, squares])
        left, updates = iter(totals), list[Tensor]()
        for (spec, p, _), grad in zip(each, grads, strict=True):
            state = self.state[p]
            if not state:
                state |= {"step": torch.zeros((), device=p.device)}
                state |= {name: m.zeros(self.shards, self.rank, p.device) for name, m in moments_of(spec).items()}
            state["step"] += done
            weight = done * state["step"].clamp(min=1) ** BETA2_DECAY
            updates.append(self._update(spec, state, grad, left, weight))
        sizes = squares.new_tensor([math.prod(spec.shape) for spec, _, _ in each])
        of_updates = zip(each, updates, strict=True)
        changed = torch.stack([self._share(spec, u.square().sum()) for (spec, _, _), u in of_updates])
        (changed,) = self._added([changed])
        bounded = ((changed / sizes).sqrt() / CLIP).clamp(min=1)
        scales = (squares / sizes).sqrt().clamp(min=LEAST_SCALE) / bounded
        for (_, p, group), update, scale in zip(each, updates, scales.unbind(), strict=True):
            rate = done * self.state[p]["step"].clamp(min=1).rsqrt().clamp(max=group["lr"])
            p.mul_(1 - done * group["lr"] * group["weight_decay"])
            p.sub_(update * (rate * scale))

    def _gradient(self, p: Tensor) -> Tensor:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.grad_scale is not None:
            grad = grad / self.grad_scale
        return grad if self.found_inf is None else torch.where(self.found_inf == 0, grad, 0.0)

    def _share(self, spec: TensorSpec, value: Tensor) -> Tensor:
        """Returns what this rank adds to a sum over all: of what tensor-parallel ranks all have, one counts."""
        return value if spec.tp_dim is not None or self.tp.get_local_rank() == 0 else torch.zeros_like(value)

    def _sums(self, spec: TensorSpec, grad: Tensor) -> list[Tensor]:
        """Returns the sums of squares of this rank's part of the rows and of the columns, in their whole vectors."""
        if len(spec.shape) < 2:
            return []
        box, squares, wholes = self.shards.box(spec, self.rank), self._share(spec, grad.square()), list[Tensor]()
        for moment, part, dim in zip(moments_of(spec).values(), (box[:-1], box[:-2] + box[-1:]), (-1, -2), strict=True):
            wholes.append(moment.zeros(self.shards, self.rank, grad.device))
            wholes[-1][slices(part)] = squares.sum(dim)
        return wholes

    def _added(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Adds up tensors over the ranks that share the parameters, all in one vector."""
        flat = torch.cat([part.flatten() for part in parts])
        for group in self.groups:
            dist.all_reduce(flat, group=group)
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def _update(self, spec: TensorSpec, state: dict[str, Tensor], grad: Tensor, totals: Any, weight: Tensor) -> Tensor:
        """Takes up the squares of a gradient, and returns the gradient over their root."""
        if len(spec.shape) < 2:
            variance = state["variance"].lerp_(grad.square(), weight)
        else:
            rows = state["row_var"].lerp_(next(totals) / spec.shape[-1], weight)
            columns = state["col_var"].lerp_(next(totals) / spec.shape[-2], weight)
            mean = rows.mean(-1, keepdim=True).clamp(min=EPS)
            box = self.shards.box(spec, self.rank)
            ours = (rows / mean)[slices(box[:-1])]
            variance = ours[..., None] * columns[slices(box[:-2] + box[-1:])][..., None, :]
        return grad * variance.clamp(min=EPS * EPS).rsqrt()
