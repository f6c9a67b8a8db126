"""Sequence parallelism: some ranks divide the rows of a pack, and, in attention, its heads (Ulysses).

All that a layer does beside attention it does row by row, each rank for its own rows. For attention, one all-to-all
gives every rank all rows of some of the heads, a second one all heads of its own rows. So sequences may begin and end
anywhere, and what attends to what is known to the attention alone. Any number of ranks will do: a head that several
have to share is theirs by rows of its queries.
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
from distflow.model.attention import Attention, AttentionParams, PackedAttention
from distflow.plan.layout import Layout
from distflow.util.copies import to_device


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that divide sequences with this one; without a group, it has them to itself."""

    group: dist.ProcessGroup | None
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "SequenceParallel":
        return ALONE if group is None else cls(group, dist.get_rank(group), dist.get_world_size(group))

    def attention(self, whole: PackedAttention, rows: int) -> Attention:
        """Returns the attention that a rank calls with its share of the `rows`; `whole` is that of all of them."""
        return whole if self.group is None else _ByHeads(whole, self.group, self.rank, self.ranks, rows)

    def join(self, values: tuple[Tensor, ...], places: Tensor | None, count: int) -> tuple[Tensor, ...]:
        """Joins the values of all ranks, of which this one has those of `places`, to `count` of each kind.

        Every rank computes the same from them, so it has the gradient of its own ones without asking others.
        """
        if self.group is None:
            return values
        return _Join.apply(self.group, places, count, *values)  # type: ignore[no-any-return, no-untyped-call]


class _ByHeads:
    """Attention to all rows, where each rank has its rows of all heads and computes all rows of its heads.

    Where the ranks do not divide the heads, a head's queries are divided, too, into the fewest parts that will do, k. A
    part has the rows of every k-th rank, so each has some that see few keys and some that see many.
    """

    def __init__(self, whole: PackedAttention, group: dist.ProcessGroup, rank: int, ranks: int, rows: int) -> None:
        self.whole, self.group, self.rank, self.ranks, self.rows = whole, group, rank, ranks, rows
        self._index: Tensor | None = None  # made by the first layer, which knows heads and device

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        own, ranks, work = q.shape[1], range(self.ranks), _Division(len(q), len(k), self.ranks)
        # [heads for rank 0, for rank 1, …; own rows, dim]: its queries, keys and values, in one message to each
        sent = [work.sent(self.rank, to) for to in ranks]
        received = [work.sent(source, self.rank) for source in ranks]
        if self._index is None:
            self._index = to_device(torch.tensor([i for parts in sent for part in parts for i in part]), q.device)
        sizes = [sum(map(len, parts)) for parts in sent], [sum(map(len, parts)) for parts in received]
        blocks = _exchange(torch.cat([q, k, v]).index_select(0, self._index), sizes, self.group).split(sizes[1])
        apart = [block.split(list(map(len, parts))) for block, parts in zip(blocks, received, strict=True)]
        every_k, every_v = (torch.cat([block[i] for block in apart], 1)[:, : self.rows] for i in (1, 2))
        outs = []  # of each rank: [rows of it, the heads that it has asked for, dim]
        if work.parts == 1:
            every_q = torch.cat([block[0] for block in apart], 1)[:, : self.rows]
            every_k, every_v = (work.for_heads(self.rank, x, received[0][0]) for x in (every_k, every_v))
            out = self.whole(layer, every_q, every_k, every_v, params)
            outs += pad(out, (0, 0, 0, 0, 0, own * self.ranks - self.rows)).split(own)
        else:
            for source, (its_q, *_) in enumerate(apart):
                first, last = source * own, min((source + 1) * own, self.rows)
                its_k, its_v = (work.for_heads(self.rank, x, received[source][0]) for x in (every_k, every_v))
                out = self.whole.of_rows(first, last, its_q[:, : max(0, last - first)], its_k, its_v, params)
                outs.append(pad(out, (0, 0, 0, 0, 0, own - len(out))))
        sizes = [len(parts[0]) for parts in received], [len(parts[0]) for parts in sent]
        back = _exchange(torch.cat([out.transpose(0, 1) for out in outs]), sizes, self.group)  # [heads, own rows, dim]
        return back.transpose(0, 1)


@dataclass(frozen=True)
class _Division:
    """Who computes what: the parts of all heads' queries, head by head, in equal numbers for each rank."""

    heads: int
    keys: int  # heads of keys and values
    ranks: int

    @property
    def parts(self) -> int:
        """Into how many the queries of a head are divided."""
        return lcm(self.heads, self.ranks) // self.heads

    def sent(self, source: int, to: int) -> tuple[range, range, range]:
        """Returns what a rank sends another of its heads' queries, keys and values, as places of all of these."""
        each, part = self.heads * self.parts // self.ranks, source % self.parts
        low, high = to * each, (to + 1) * each
        queries = range(-(-(low - part) // self.parts), -(-(high - part) // self.parts))
        k = range(self._key(low // self.parts), self._key((high - 1) // self.parts) + 1)
        first_k, first_v = self.heads, self.heads + self.keys
        return queries, _moved(k, first_k), _moved(k, first_v)

    def for_heads(self, rank: int, x: Tensor, queries: range) -> Tensor:
        """Returns the keys or values [key heads of the rank, rows, dim] that go with some heads' queries."""
        first = self.sent(0, rank)[1].start - self.heads
        wanted = [self._key(head) - first for head in queries]
        even = len(queries) // len(x)
        if wanted == [i // max(1, even) for i in range(even * len(x))]:
            return x
        return x.index_select(0, to_device(torch.tensor(wanted, dtype=torch.int64), x.device))

    def _key(self, head: int) -> int:
        return head * self.keys // self.heads


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


ALONE = SequenceParallel(None)


def _exchange(x: Tensor, sizes: tuple[list[int], list[int]], group: dist.ProcessGroup) -> Tensor:
    """x [heads, …]: so many of them go to each rank → [heads, …]: so many have come from each."""
    return _Exchange.apply(x, sizes, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[list[int], list[int]], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        sent, received = sizes
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(d, ctx.sizes[::-1], ctx.group), None, None


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


def check_divisible(model: PreTrainedModel, layout: Layout, where: str) -> None:
    """Raises unless the ranks of a replica can divide what the model reads."""
    if layout.sp > 1 and getattr(model.config, "vision_config", None) is not None:
        raise ConfigError(
            f"{where}: sp {layout.sp} would divide the images of a {model.config.model_type} model; use sp 1, and tp"
        )
