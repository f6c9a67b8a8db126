"""Which part of a model's parameters each rank has.

Tensor parallelism cuts a parameter along one dimension, or not at all; FSDP cuts what is left along the first one.
"""

from dataclasses import dataclass
from math import prod

from distflow.plan.layout import Layout

Box = tuple[tuple[int, int], ...]  # [from, to) in each dimension


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
        t = self.layout.cells[d].index(rank)
        return part_of(spec.shape, spec.tp_dim, t, self.layout.tp, d % self.shard, self.shard)


def part_of(shape: tuple[int, ...], tp_dim: int | None, t: int, tp: int, s: int, shard: int) -> Box:
    """Returns part t of `tp` along `tp_dim` (None: all), and of that chunk s of `shard` along the first dimension."""
    box = [(0, n) for n in shape]
    if tp_dim is not None:
        size = shape[tp_dim] // tp
        box[tp_dim] = t * size, (t + 1) * size
    if box:
        first, end = box[0]
        size = -(-(end - first) // shard)  # as torch.chunk cuts
        box[0] = min(first + s * size, end), min(first + (s + 1) * size, end)
    return tuple(box)


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
