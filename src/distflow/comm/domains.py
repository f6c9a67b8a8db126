"""The domains of a move: pure functions of the plan, with the same result on every rank.

With many replicas, samples are assigned within *domains*: blocks of consecutive replicas of the source and the
corresponding blocks of the target, each with an equal range of the step's slots. The cost of a move for a rank then
depends on the size of a domain, not on the number of workers. If all ranks of a domain already know the replica of
every sample, on both sides, the move exchanges no metadata.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from distflow.comm.routes import contiguous_replicas
from distflow.plan.layout import Layout
from distflow.plan.tasks import Move, Partition, Plan
from distflow.util.arrays import Ints

MAX_REPLICAS = 64  # of a domain, on either side, if the layouts permit


@dataclass(frozen=True)
class Domain:
    """A rank's part of a move: the move among the ranks of its domain, and its slots."""

    move: Move
    first: int  # slot
    samples: int
    known: bool  # all of its ranks know the replica of each slot, before and after


class Domains:
    """The domains of all moves of a step with this number of samples."""

    def __init__(self, plan: Plan, samples: int) -> None:
        self.samples, self.prompts = samples, samples // plan.repeat
        self._assigned: dict[str, int] = {}  # partition → domains in which a move assigned its samples
        self._counts: dict[str, int] = {}  # move → domains
        self._of: dict[tuple[str, int], Domain] = {}  # move, rank → the same in every step
        self._earlier: dict[str, dict[str, tuple[Move, ...]]] = {}  # move → partition → earlier moves that involve it
        involved: dict[str, tuple[Move, ...]] = {}
        for p in plan.partitions:
            if p.uneven:
                self._assigned[p.id] = 1
        for move in plan.moves:
            self._counts[move.id] = self._count(move)
            if move.assigns:
                self._assigned[move.dst.id] = self._counts[move.id]
            self._earlier[move.id] = {p.id: involved.get(p.id, ()) for p in (move.src, move.dst)}
            for p in (move.src, move.dst):
                involved[p.id] = (*involved.get(p.id, ()), move)

    def of(self, move: Move, rank: int) -> Domain:
        """Returns the domain in which a rank takes part in a move."""
        if (move.id, rank) not in self._of:
            self._of[move.id, rank] = self._derive(move, rank)
        return self._of[move.id, rank]

    def all(self, move: Move) -> list[Domain]:
        """Returns the domains of a move, in the order of their slots."""
        ranks, count = move.src.layout.ranks, self._counts[move.id]
        return [self.of(move, ranks[i * len(ranks) // count]) for i in range(count)]

    def _derive(self, move: Move, rank: int) -> Domain:
        count = self._counts[move.id]
        index = _block(move.src.layout, rank, count)
        if index is None:
            index = _block(move.dst.layout, rank, count)
        assert index is not None
        size = self.samples // count
        within = _within(move, index, count)
        return Domain(within, index * size, size, self._is_known(move, within, index, count))

    def _count(self, move: Move) -> int:
        """Returns the number of domains, a product of the smallest factors for which blocks and slots correspond."""
        count = 1
        while (size := max(move.src.layout.dp, move.dst.layout.dp) // count) > MAX_REPLICAS:
            factors = range(2, size // max(1, MAX_REPLICAS // 8) + 1)  # a domain of few has little to balance with
            factor = next((f for f in factors if self._divides(move, f * count)), None)
            if factor is None:
                break
            count *= factor
        return count

    def _divides(self, move: Move, count: int) -> bool:
        src, dst = move.src.layout, move.dst.layout
        if src.dp % count or dst.dp % count or self.prompts % count:
            return False
        assigned = [self._assigned.get(p.id) for p in ((move.src,) if move.assigns else (move.src, move.dst))]
        if any(d is not None and d % count for d in assigned):
            return False
        return _blocks_correspond(src, dst, count)

    def _is_known(self, move: Move, within: Move, index: int, count: int) -> bool:
        if move.assigns:
            return False
        for p in (move.src, move.dst):
            if p.id not in self._assigned:  # contiguous shares
                continue
            earlier = [t for t in self._earlier[move.id][p.id] if self._counts[t.id] == count]
            if self._assigned[p.id] != count or not set(within.ranks) <= _ranks(earlier, index, count):
                return False
        return True


def contiguous_assignment(partition: Partition, samples: int, group_size: int) -> Ints:
    """Returns the replica of each slot in a partition to which no move has assigned samples."""
    unit = group_size if partition.whole_groups else 1
    return np.repeat(contiguous_replicas(samples // unit, partition.layout.dp), unit)


@lru_cache(maxsize=256)
def _blocks_correspond(src: Layout, dst: Layout, count: int) -> bool:
    """Returns whether every rank of both layouts is in the same block of each: its samples may have to stay there."""
    return all(_block(dst, r, count) in (None, _block(src, r, count)) for r in src.ranks)


def _ranks(moves: Iterable[Move], index: int, count: int) -> set[int]:
    return {r for move in moves for r in _within(move, index, count).ranks}


def _block(layout: Layout, rank: int, count: int) -> int | None:
    replica = layout.replica_of(rank)
    return None if replica is None else replica * count // layout.dp


def _within(move: Move, index: int, count: int) -> Move:
    """Returns the move among the ranks of one of `count` domains."""
    if count == 1:
        return move

    def block(p: Partition) -> Partition:
        ranks = p.layout.ranks[index * len(p.layout.ranks) // count : (index + 1) * len(p.layout.ranks) // count]
        return replace(p, layout=replace(p.layout, ranks=ranks, dp=p.layout.dp // count))

    return replace(move, src=block(move.src), dst=block(move.dst))
