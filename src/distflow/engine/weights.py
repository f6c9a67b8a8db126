"""The weight hand-over from one layout to another, peer to peer: a rank sends another what that one lacks, and no more.

Tensor parallelism cuts a parameter along one dimension, or not at all; FSDP cuts what is left along the first one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from distflow.data.exchange import AllToAll, Collective
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
class Shards:
    """Which part of a parameter each rank of a layout has.

    FSDP cuts it over `shard` consecutive dp ranks and replicates it beyond (hybrid sharding): with `shard == layout.dp`
    every rank has a part of its own, with `shard == 1` every cell has it all.
    """

    layout: Layout
    shard: int

    @property
    def replicas(self) -> int:
        return self.layout.dp // self.shard

    def box(self, spec: Spec, rank: int) -> Box:
        """Returns the part of a parameter that this rank has."""
        d = self.layout.cell_of(rank)
        assert d is not None
        box = [(0, n) for n in spec.shape]
        if spec.tp_dim is not None:
            t = self.layout.cells[d].index(rank)
            size = spec.shape[spec.tp_dim] // self.layout.tp
            box[spec.tp_dim] = t * size, (t + 1) * size
        if box:
            first, end = box[0]
            size = -(-(end - first) // self.shard)  # as torch.chunk cuts
            s = d % self.shard
            box[0] = min(first + s * size, end), min(first + (s + 1) * size, end)
        return tuple(box)

    def sources(self, spec: Spec, receiver: int) -> Iterator[tuple[int, Box]]:
        """Yields ranks that together have the whole parameter, with the part of each; of replicas, a near one."""
        for d in range(self.shard):
            cell = self.layout.cells[d]
            if spec.tp_dim is None:
                ranks: Sequence[int] = [receiver if receiver in cell else cell[receiver % len(cell)]]
            else:
                ranks = cell
            for rank in ranks:
                yield rank, self.box(spec, rank)


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def within(box: Box, inner: Box) -> tuple[slice, ...]:
    """Returns the place of `inner` in a tensor that holds `box`."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(inner, box, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Returns its place in the whole parameter."""
    return tuple(slice(lo, hi) for lo, hi in box)


def size(box: Box) -> int:
    return prod(hi - lo for lo, hi in box)


class HandOver:
    """Moves weights from the ranks of `source` to those of `target`. All ranks of both drive `run`."""

    def __init__(self, specs: Sequence[Spec], source: Shards, target: Shards, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.dtype = rank, dtype
        self.ranks = tuple(sorted({*source.layout.ranks, *target.layout.ranks}))
        self.source, self.target = source, target
        self.buckets: list[list[Spec]] = [[]]
        filled = 0
        for spec in specs:
            if filled >= _BUCKET:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(spec)
            filled += 4 * prod(spec.shape)

    def run(self, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> Iterator[Collective]:
        """Fills `filled`, this rank's parameters in the target layout, from everybody's `held` in the source layout.

        A tensor of `held` is looked up when its bucket is sent, and once: it may be computed then.
        """
        for bucket in self.buckets:
            parts = {spec.name: held[spec.name] for spec in bucket} if held else {}
            yield from self._bucket(bucket, parts, filled)

    def _bucket(
        self, bucket: list[Spec], held: Mapping[str, Tensor], filled: Mapping[str, Tensor]
    ) -> Iterator[Collective]:
        me, kind = self.rank, self.dtype
        parts: dict[int, list[Tensor]] = {r: [] for r in self.ranks}  # of mine, for each rank
        if me in self.source.layout.ranks:
            for receiver in self.target.layout.ranks:
                for spec, sender, inner in self._pieces(bucket, receiver):
                    if sender == me:
                        mine = held[spec.name][within(self.source.box(spec, me), inner)]
                        if receiver == me:
                            filled[spec.name][within(self.target.box(spec, me), inner)].copy_(mine)
                        else:
                            parts[receiver].append(mine)
        incoming: dict[int, list[tuple[Spec, Box]]] = {r: [] for r in self.ranks}
        if me in self.target.layout.ranks:
            for spec, sender, inner in self._pieces(bucket, me):
                if sender != me:
                    incoming[sender].append((spec, inner))
        width = kind.itemsize

        def write(out: Tensor) -> None:
            at = 0
            for rank in self.ranks:
                for part in parts[rank]:
                    end = at + part.numel() * width
                    out[at:end].view(kind).view(part.shape).copy_(part)
                    at = end

        send = [sum(p.numel() for p in parts[r]) * width for r in self.ranks]
        receive = [sum(size(b) for _, b in incoming[r]) * width for r in self.ranks]
        device = next(iter((held or filled).values())).device
        out = torch.empty(sum(receive), dtype=torch.uint8, device=device)
        yield AllToAll(self.ranks, write, send, out, receive)
        at = 0
        for rank in self.ranks:
            for spec, inner in incoming[rank]:
                end = at + size(inner) * width
                place = filled[spec.name][within(self.target.box(spec, me), inner)]
                place.copy_(out[at:end].view(kind).view(place.shape))
                at = end

    def _pieces(self, bucket: list[Spec], receiver: int) -> Iterator[tuple[Spec, int, Box]]:
        """Yields what a rank receives: of which parameter, from which rank, which part."""
        for spec in bucket:
            wanted = self.target.box(spec, receiver)
            for sender, has in self.source.sources(spec, receiver):
                inner = overlap(wanted, has)
                if inner is not None:
                    yield spec, sender, inner
