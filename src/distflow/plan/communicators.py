"""Says which ranks join which communicator, and in which order. Pure, and the same on every rank that derives it.

Every rank joins the communicators that it is a member of in the one order of `communicators`, before anything uses
them: what each joins is a subsequence of that order, so no ranks wait in a circle, and none uses a communicator that
others have yet to join.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from distflow.plan.layout import Layout
from distflow.plan.tasks import Plan, SyncWeights

WEIGHT_SYNC = "weight sync"


@dataclass(frozen=True)
class Communicator:
    """Some ranks that talk to each other by a backend of their devices."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MeshShape:
    """The mesh of a layout: `dp` × `tp`, or `replicate` × `shard` × `tp` with that many shards.

    Weights are held as if ranks that divide sequences were replicas: the layout is one without sp.
    """

    layout: Layout
    shard: int | None = None

    @cached_property
    def dims(self) -> dict[str, int]:
        """The sizes of the dimensions, by name."""
        if self.shard is None:
            return {"dp": self.layout.dp, "tp": self.layout.tp}
        return {"replicate": self.layout.dp // self.shard, "shard": self.shard, "tp": self.layout.tp}

    def communicators(self) -> Iterator[Communicator]:
        """Yields those of each dimension: the ranks that differ in that coordinate alone."""
        ranks, sizes = self.layout.ranks, list(self.dims.values())
        for k, (dim, size) in enumerate(self.dims.items()):
            inner = prod(sizes[k + 1 :])
            for start in range(0, len(ranks), size * inner):
                for offset in range(start, start + inner):
                    yield Communicator(f"{dim} of {self}", ranks[offset : offset + size * inner : inner])

    def __str__(self) -> str:
        return "×".join(f"{dim}{size}" for dim, size in self.dims.items())


def sequence_layouts(plans: Sequence[Plan]) -> list[Layout]:
    """Returns the layouts whose replicas divide sequences."""
    return list(dict.fromkeys(p.layout for plan in plans for p in plan.partitions if p.layout.sp > 1))


def sequence_groups(layout: Layout) -> Iterator[Communicator]:
    """Yields those of the ranks that divide sequences: of a replica, those with one tensor-parallel rank."""
    for replica in layout.replicas:
        for t in range(layout.tp):
            yield Communicator(f"sp of {layout}", replica[t :: layout.tp])


def communicators(meshes: Sequence[MeshShape], plans: Sequence[Plan]) -> list[Communicator]:
    """Returns the communicators of all ranks, in the order in which they are joined."""
    made = [c for mesh in meshes for c in mesh.communicators()]
    made += [c for layout in sequence_layouts(plans) for c in sequence_groups(layout)]
    synced = sorted({rank for p in plans for t in p.tasks if isinstance(t, SyncWeights) for rank in t.ranks})
    if len(synced) > 1:
        # Of its own: in a weight sync only some ranks send to some, which does not join anybody. And it may run in
        # another thread than the collectives of models, whose order it must not depend on.
        made.append(Communicator(WEIGHT_SYNC, tuple(synced)))
    return made
