"""Sequence parallelism: some ranks divide the rows of a pack, and, in attention, its heads (Ulysses).

All that a layer does beside attention it does row by row, each rank for its own rows. For attention, one all-to-all
gives every rank all rows of some of the heads, a second one all heads of its own rows. So sequences may begin and end
anywhere, and what attends to what is known to the attention alone.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from distflow.errors import ConfigError
from distflow.model.attention import Attention, AttentionParams
from distflow.model.processor import reads_images
from distflow.plan.layout import Layout


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that divide sequences with this one; without a group, it has them to itself."""

    group: dist.ProcessGroup | None
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "SequenceParallel":
        return ALONE if group is None else cls(group, dist.get_rank(group), dist.get_world_size(group))

    def attention(self, whole: Attention, rows: int) -> Attention:
        """Returns the attention that a rank calls with its share of the `rows`; `whole` is that of all of them."""
        return whole if self.group is None else _ByHeads(whole, self.group, self.ranks, rows)

    def join(self, values: tuple[Tensor, ...], places: Tensor | None, count: int) -> tuple[Tensor, ...]:
        """Joins the values of all ranks, of which this one has those of `places`, to `count` of each kind.

        Every rank computes the same from them, so it has the gradient of its own ones without asking others.
        """
        if self.group is None:
            return values
        return _Join.apply(self.group, places, count, *values)  # type: ignore[no-any-return, no-untyped-call]


class _ByHeads:
    """Attention to all rows, where each rank has its rows of all heads and computes all rows of its heads."""

    def __init__(self, whole: Attention, group: dist.ProcessGroup, ranks: int, rows: int) -> None:
        self.whole, self.group, self.ranks, self.rows = whole, group, ranks, rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        repeat = lcm(len(k), self.ranks) // len(k)  # of fewer key heads than ranks, several need the same one
        if repeat > 1:
            k, v = (x.repeat_interleave(repeat, 0) for x in (k, v))
        # [heads, own rows, dim] → [ranks, own rows, dim of that rank's heads]: one message for all three
        parts = [x.unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2) for x in (q, k, v)]
        widths = [part.shape[2] for part in parts]
        received = _exchange(torch.cat(parts, 2), self.group).flatten(0, 1)[: self.rows]
        # [rows, dim of the own heads] → [own heads, rows, dim]
        q_own, k_own, v_own = (
            part.unflatten(1, (-1, x.shape[2])).transpose(0, 1)
            for part, x in zip(received.split(widths, 1), (q, k, v), strict=True)
        )
        out = self.whole(layer, q_own, k_own, v_own, params)  # [rows, own heads, dim]
        mine = pad(out.flatten(1), (0, 0, 0, q.shape[1] * self.ranks - self.rows))
        back = _exchange(mine.unflatten(0, (self.ranks, -1)), self.group)  # [ranks, own rows, dim of that rank's heads]
        joined: Tensor = back.transpose(0, 1).flatten(1).unflatten(1, (q.shape[0], -1))  # [own rows, heads, dim]
        return joined


ALONE = SequenceParallel(None)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [ranks, …]: part i goes to rank i → [ranks, …]: part i has come from rank i."""
    return _Exchange.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return _exchange(d, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, places: Tensor, count: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.lengths = places, [len(v) for v in values]
        ctx.set_materialize_grads(False)
        whole = values[0].new_zeros(len(values), count)
        whole[:, places] = torch.stack([v[: len(places)] for v in values])
        dist.all_reduce(whole, group=group)  # each number is on one rank, and 0 on the others
        return tuple(part.clone() for part in whole)  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        def own(d: Tensor | None, length: int) -> Tensor | None:
            return None if d is None else pad(d[ctx.places], (0, length - len(ctx.places)))

        return None, None, None, *map(own, gradients, ctx.lengths)


def check_heads(model: PreTrainedModel, layout: Layout, where: str) -> None:
    """Raises unless the ranks of a replica can divide the heads of attention."""
    if layout.sp > 1 and reads_images(model.config):
        raise ConfigError(
            f"{where}: sp {layout.sp} would divide the images of a {model.config.model_type} model; use sp 1, and tp"
        )
    heads: int = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    if layout.sp > 1 and getattr(model.config, "vision_config", None) is not None:
        raise ConfigError(f"{where}: sp {layout.sp}, but this model reads images, which are not divided; use sp 1")
    if layout.sp > 1 and heads % layout.replica_size:
        fits = [str(n) for n in range(1, heads // layout.tp + 1) if heads % (n * layout.tp) == 0]
        kind = f"sp {layout.sp}" + (f" × tp {layout.tp}" if layout.tp > 1 else "")
        raise ConfigError(
            f"{where}: {kind} does not divide the model's {heads} attention heads, of which each rank computes some;"
            f" use sp {' or '.join(fits)}"
        )
