"""The part of each parameter that a rank has.

Tensor parallelism cuts a parameter along one dimension, or not at all; FSDP cuts the result along the first one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from distflow.plan.layout import Layout

Box = tuple[tuple[int, int], ...]  # [from, to) in each dimension


@dataclass(frozen=True)
class TensorSpec:
    """A parameter: its name, its global shape and the dimension that tensor parallelism cuts."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None


@dataclass(frozen=True)
class Shards:
    """The sharding of parameters over the ranks of a layout.

    FSDP cuts a parameter over `shard` consecutive dp ranks and replicates the shards (hybrid sharding): with
    `shard == layout.dp` every rank has a part of its own, with `shard == 1` every replica has a copy. `blocks` maps
    parameters that only this layout cuts, although `tp_dim` is None, to the rows per tensor-parallel rank; the last
    ranks may have none.
    """

    layout: Layout
    shard: int
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def copies(self) -> int:
        """Returns the number of full copies of the parameters in this layout."""
        return self.layout.dp // self.shard

    def cuts(self, spec: TensorSpec) -> bool:
        """Returns whether the ranks of a replica have different parts of a parameter."""
        return spec.tp_dim is not None or spec.name in self.blocks

    def box(self, spec: TensorSpec, rank: int) -> Box:
        """Returns the part of a parameter that this rank has."""
        d = self.layout.replica_of(rank)
        assert d is not None
        t = self.layout.replicas[d].index(rank)
        if block := self.blocks.get(spec.name):
            return (block_of(spec.shape[0], block, t), *((0, n) for n in spec.shape[1:]))
        return part_of(spec.shape, spec.tp_dim, t, self.layout.tp, d % self.shard, self.shard)


def part_of(shape: tuple[int, ...], tp_dim: int | None, t: int, tp: int, s: int, shard: int) -> Box:
    """Returns chunk s of `shard`, along the first dimension, of part t of `tp` along `tp_dim` (None: not cut)."""
    box = [(0, n) for n in shape]
    if tp_dim is not None:
        size = shape[tp_dim] // tp
        box[tp_dim] = t * size, (t + 1) * size
    if box:
        first, end = box[0]
        size = -(-(end - first) // shard)  # as torch.chunk cuts
        box[0] = min(first + s * size, end), min(first + (s + 1) * size, end)
    return tuple(box)


def block_of(rows: int, block: int, t: int) -> tuple[int, int]:
    """Returns the rows of block t."""
    return min(t * block, rows), min((t + 1) * block, rows)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes, None if it is empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def within(box: Box, inner: Box) -> tuple[slice, ...]:
    """Returns the index of `inner` in a tensor that holds `box`."""
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(inner, box, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Returns the index of a box in the whole parameter."""
    return tuple(slice(lo, hi) for lo, hi in box)


def size(box: Box) -> int:
    return prod(hi - lo for lo, hi in box)
