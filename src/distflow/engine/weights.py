"""Weights from one layout to another, peer to peer: every rank sends what it has of what another needs, and no more.

A parameter is cut by tensor parallelism along one dimension, or not at all, and what is left by FSDP along the first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from distflow.data.exchange import AllToAll, Collective
from distflow.engine.cpu import by_columns
from distflow.plan.layout import Layout

Box = tuple[tuple[int, int], ...]  # [from, to) in each dimension
_BUCKET = 1 << 26  # bytes of parameters in one exchange


@dataclass(frozen=True)
class Spec:
    """A parameter: its name, its whole shape, and the dimension that tensor parallelism cuts."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None


@dataclass(frozen=True)
class Held:
    """A layout as a holder of weights: `sharded` over its data-parallel cells (FSDP), or whole in each of them."""

    layout: Layout
    sharded: bool

    def box(self, spec: Spec, rank: int) -> Box:
        """What this rank has of a parameter."""
        place = self.layout.ranks.index(rank)
        d, t = divmod(place, self.layout.tp)
        box = [(0, n) for n in spec.shape]
        if spec.tp_dim is not None:
            size = spec.shape[spec.tp_dim] // self.layout.tp
            box[spec.tp_dim] = t * size, (t + 1) * size
        if self.sharded and box:
            first, end = box[0]
            size = -(-(end - first) // self.layout.dp)  # as torch.chunk cuts
            box[0] = min(first + d * size, end), min(first + (d + 1) * size, end)
        return tuple(box)

    def sources(self, spec: Spec, taker: int) -> Iterator[tuple[int, Box]]:
        """Ranks that together have the whole parameter, with the part of each; of replicas, one that is near."""
        dp = self.layout.dp if self.sharded else 1
        for d in range(dp):
            cell = self.layout.cells[d]
            if spec.tp_dim is None:
                ranks: Sequence[int] = [taker if taker in cell else cell[taker % len(cell)]]
            else:
                ranks = cell
            for rank in ranks:
                yield rank, self.box(spec, rank)


def room(
    shapes: Mapping[str, tuple[int, ...]], together: Iterable[Sequence[str]], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Memory for parameters. Matrices that are used `together` lie side by side, as `by_columns` has it."""
    made: dict[str, Tensor] = {}
    for names in together:
        rows, width = [shapes[n][0] for n in names], shapes[names[0]][1]
        if by_columns(dtype, device):
            whole = torch.empty(width, sum(rows), dtype=dtype).T
        else:
            whole = torch.empty(sum(rows), width, dtype=dtype, device=device)
        made |= {name: whole[end - n : end] for name, n, end in zip(names, rows, accumulate(rows), strict=True)}
    alone = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items() if name not in made}
    return made | alone


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def within(box: Box, inner: Box) -> tuple[slice, ...]:
    """Where `inner` is in a tensor that holds `box`."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(inner, box, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Where it is in the whole parameter."""
    return tuple(slice(lo, hi) for lo, hi in box)


def size(box: Box) -> int:
    return prod(hi - lo for lo, hi in box)


class HandOver:
    """From `giver` to `taker`, for one rank of either. `run` is to be driven by all ranks of both."""

    def __init__(self, specs: Sequence[Spec], giver: Held, taker: Held, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.dtype = rank, dtype
        self.ranks = tuple(sorted({*giver.layout.ranks, *taker.layout.ranks}))
        self.giver, self.taker = giver, taker
        self.buckets: list[list[Spec]] = [[]]
        filled = 0
        for spec in specs:
            if filled >= _BUCKET:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(spec)
            filled += 4 * prod(spec.shape)

    def run(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Iterator[Collective]:
        """`source`: this rank's part of each parameter as giver; `target`: the tensors to fill, as taker.

        What is in `source` is looked up when its turn comes, and once: it may be made then.
        """
        for bucket in self.buckets:
            parts = {spec.name: source[spec.name] for spec in bucket} if source else {}
            yield from self._bucket(bucket, parts, target)

    def _bucket(
        self, bucket: list[Spec], source: Mapping[str, Tensor], target: Mapping[str, Tensor]
    ) -> Iterator[Collective]:
        me, kind = self.rank, self.dtype
        parts: dict[int, list[Tensor]] = {r: [] for r in self.ranks}  # of mine, for each rank
        if me in self.giver.layout.ranks:
            for taker in self.taker.layout.ranks:
                for spec, giver, inner in self._pieces(bucket, taker):
                    if giver == me:
                        mine = source[spec.name][within(self.giver.box(spec, me), inner)]
                        if taker == me:
                            target[spec.name][within(self.taker.box(spec, me), inner)].copy_(mine)
                        else:
                            parts[taker].append(mine)
        coming: dict[int, list[tuple[Spec, Box]]] = {r: [] for r in self.ranks}
        if me in self.taker.layout.ranks:
            for spec, giver, inner in self._pieces(bucket, me):
                if giver != me:
                    coming[giver].append((spec, inner))
        width = kind.itemsize

        def write(out: Tensor) -> None:
            at = 0
            for rank in self.ranks:
                for part in parts[rank]:
                    end = at + part.numel() * width
                    out[at:end].view(kind).view(part.shape).copy_(part)
                    at = end

        send = [sum(p.numel() for p in parts[r]) * width for r in self.ranks]
        receive = [sum(size(b) for _, b in coming[r]) * width for r in self.ranks]
        device = next(iter((source or target).values())).device
        out = torch.empty(sum(receive), dtype=torch.uint8, device=device)
        yield AllToAll(self.ranks, write, send, out, receive)
        at = 0
        for rank in self.ranks:
            for spec, inner in coming[rank]:
                end = at + size(inner) * width
                place = target[spec.name][within(self.taker.box(spec, me), inner)]
                place.copy_(out[at:end].view(kind).view(place.shape))
                at = end

    def _pieces(self, bucket: list[Spec], taker: int) -> Iterator[tuple[Spec, int, Box]]:
        """What a rank takes: of which parameter, from whom, which part."""
        for spec in bucket:
            wanted = self.taker.box(spec, taker)
            for giver, has in self.giver.sources(spec, taker):
                inner = overlap(wanted, has)
                if inner is not None:
                    yield spec, giver, inner
