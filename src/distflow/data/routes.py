"""Who sends which samples to whom: a pure function of the layouts and the lengths. The same on every rank.

A *slot* is a sample's place in its step, 0 … samples − 1. Locality first: a sample stays on a rank that holds it if
that rank may take it. Balance second: equal counts, near-equal weights. Replicas speak once, and share the sending.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distflow.data.balance import Ints, even_out, spread
from distflow.plan.layout import Layout


def contiguous(samples: int, cells: int) -> Ints:
    """The cell of each slot when samples are dealt in equal contiguous runs, as the loader does."""
    return np.arange(samples, dtype=np.int64) * cells // max(samples, 1)


def deal(owner: Ints, src: Layout, dst: Layout, weights: Ints, group: int, balance: bool) -> Ints:
    """The new cell of each slot, given the cell that owns it now.

    `group` consecutive slots stay together. With `balance` samples may leave a rank for the sake of even weights;
    without it only samples that have to move anyway are placed evenly.
    """
    if group > 1:
        first = owner.reshape(-1, group)[:, 0]
        units = deal(first, src, dst, weights.reshape(-1, group).sum(1), 1, balance)
        return np.repeat(units, group)
    n, cells = len(owner), dst.dp
    quota = (n + np.arange(cells, dtype=np.int64)[::-1]) // cells  # differ by at most one
    new, moving = _stay(owner, src, dst, weights, quota)
    stay = np.flatnonzero(~moving)
    room = quota - np.bincount(new[stay], minlength=cells)
    load = np.bincount(new[stay], weights[stay], cells).astype(np.int64)
    units = np.flatnonzero(moving)
    new[units] = spread(units, weights, room, load)
    return even_out(new, weights, cells, np.ones(n, bool) if balance else moving)


def _stay(owner: Ints, src: Layout, dst: Layout, weights: Ints, quota: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Give each slot to a cell that overlaps its present one, up to the quota; also which slots found no such place."""
    homes, count = _overlaps(src, dst)
    # Heaviest first, back and forth over the cells that may keep it, so that even this is balanced.
    order = np.lexsort((-weights, owner))
    turn = _position_in_run(owner[order])
    k = np.maximum(count[owner[order]], 1)
    turn %= 2 * k
    turn = np.where(turn < k, turn, 2 * k - 1 - turn)
    new = np.empty(len(owner), np.int64)
    new[order] = homes[owner[order], turn]
    homeless = new < 0
    by_cell = np.argsort(np.where(homeless, dst.dp, new), kind="stable")
    placed = by_cell[: len(owner) - int(homeless.sum())]
    over = placed[_position_in_run(new[placed]) >= quota[new[placed]]]
    homeless[over] = True
    new[homeless] = 0
    return new, homeless


@lru_cache(maxsize=64)
def _overlaps(src: Layout, dst: Layout) -> tuple[Ints, Ints]:
    """Per source cell: the target cells that share a rank with it (−1 padded), most shared first, and how many."""
    lists = []
    for cell in src.cells:
        shared = [d for r in cell if (d := dst.cell_of(r)) is not None]
        lists.append(sorted(set(shared), key=lambda d: (-shared.count(d), d)))
    homes = np.full((len(lists), max(1, *map(len, lists))), -1, np.int64)
    for i, cells in enumerate(lists):
        homes[i, : len(cells)] = cells
    return homes, np.array([len(cells) for cells in lists], np.int64)


def _position_in_run(values: Ints) -> Ints:
    """Index of each element within its run of equal neighbours: [7 7 9 9 9] → [0 1 0 1 2]."""
    at = np.arange(len(values), dtype=np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return at - np.repeat(starts, np.diff(starts, append=len(values)))


@dataclass(frozen=True)
class Route:
    """One rank's part: slots to send to and to receive from each other rank, and those it keeps. All ascending."""

    send: dict[int, Ints]
    receive: dict[int, Ints]
    keep: Ints


def route(rank: int, src: Layout, dst: Layout, owner: Ints, new: Ints) -> Route:
    """Derive a rank's part of the exchange from the old and the new cell of every slot."""
    here, there = src.cell_of(rank), dst.cell_of(rank)
    send: dict[int, Ints] = {}
    if here is not None:
        mine, replica = np.flatnonzero(owner == here), src.cells[here].index(rank)
        for d, slots in _grouped(mine, new[mine]):
            for to in dst.cells[d]:
                if src.cell_of(to) != here:
                    part = slots if src.tp == 1 else slots[_speaker(len(slots), to, src.tp) == replica]
                    if len(part):
                        send[to] = part
    receive: dict[int, Ints] = {}
    keep = np.empty(0, np.int64)
    if there is not None:
        wanted = np.flatnonzero(new == there)
        for s, slots in _grouped(wanted, owner[wanted]):
            if s == here:
                keep = slots
                continue
            speaker = _speaker(len(slots), rank, src.tp)
            for t, sender in enumerate(src.cells[s]):
                part = slots if src.tp == 1 else slots[speaker == t]
                if len(part):
                    receive[sender] = part
    return Route(send, receive, keep)


def _speaker(count: int, to: int, tp: int) -> Ints:
    """Which replica sends each of `count` samples: in turn, starting elsewhere for every receiver."""
    return (np.arange(count, dtype=np.int64) + to) % tp


def _grouped(slots: Ints, key: Ints) -> list[tuple[int, Ints]]:
    order = np.argsort(key, kind="stable")
    slots, key = slots[order], key[order]
    cuts = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
    return [(int(key[a]), slots[a:b]) for a, b in pairwise(cuts) if b > a]
