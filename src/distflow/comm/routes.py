"""Routes of samples between ranks: a pure function of the layouts and the lengths, with the same result on every rank.

A *slot* is the index of a sample in its step, 0 … samples − 1. Locality first: a sample stays on a rank that holds it
if that rank can take it. Balance second: equal counts, near-equal weights. The ranks of a replica hold the same samples
and take turns in sending them; if some are on the receiver's host, only these send.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distflow.comm.balance import assign_evenly, rebalance
from distflow.plan.layout import Layout
from distflow.plan.topology import Topology
from distflow.util.arrays import Ints, position_in_run


def contiguous_replicas(samples: int, replicas: int) -> Ints:
    """Returns the replica of each slot (or prompt) if replicas have contiguous shares, as the loader divides them."""
    return np.arange(samples, dtype=np.int64) * replicas // max(samples, 1)


def assign_replicas(old: Ints, src: Layout, dst: Layout, weights: Ints, group_size: int, balance: bool) -> Ints:
    """Returns the new replica of each slot, given its old replica.

    Every `group_size` consecutive slots stay together. With `balance`, samples may leave a rank to even out the
    weights; without it, only samples that have to move anyway are distributed evenly.
    """
    if group_size > 1:
        first = old.reshape(-1, group_size)[:, 0]
        groups = assign_replicas(first, src, dst, weights.reshape(-1, group_size).sum(1), 1, balance)
        return np.repeat(groups, group_size)
    n, replicas = len(old), dst.dp
    quota = np.bincount(contiguous_replicas(n, replicas), minlength=replicas)  # differ by at most one
    new, moving = _assign_local(old, src, dst, weights, quota)
    stay = np.flatnonzero(~moving)
    capacity = quota - np.bincount(new[stay], minlength=replicas)
    load = np.bincount(new[stay], weights[stay], replicas).astype(np.int64)
    units = np.flatnonzero(moving)
    new[units] = assign_evenly(units, weights, capacity, load)
    return rebalance(new, weights, replicas, np.ones(n, bool) if balance else moving)


def _assign_local(old: Ints, src: Layout, dst: Layout, weights: Ints, quota: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Assigns slots to replicas that share a rank with their old one, up to the quota; returns also which must move."""
    overlapping, count = _overlaps(src, dst)
    # Heaviest first, back and forth over the overlapping replicas, so that this is balanced, too.
    order = np.lexsort((-weights, old))
    turn = position_in_run(old[order])
    k = np.maximum(count[old[order]], 1)
    turn %= 2 * k
    turn = np.where(turn < k, turn, 2 * k - 1 - turn)
    new = np.empty(len(old), np.int64)
    new[order] = overlapping[old[order], turn]
    moving = new < 0
    by_replica = np.argsort(np.where(moving, dst.dp, new), kind="stable")
    placed = by_replica[: len(old) - int(moving.sum())]
    over = placed[position_in_run(new[placed]) >= quota[new[placed]]]
    moving[over] = True
    new[moving] = 0
    return new, moving


@lru_cache(maxsize=64)
def _overlaps(src: Layout, dst: Layout) -> tuple[Ints, Ints]:
    """Returns, for each source replica, the target replicas that share ranks with it, most shared first, and how many.

    The lists are padded with −1.
    """
    lists = []
    for replica in src.replicas:
        shared = [d for r in replica if (d := dst.replica_of(r)) is not None]
        lists.append(sorted(set(shared), key=lambda d: (-shared.count(d), d)))
    padded = np.full((len(lists), max(1, *map(len, lists))), -1, np.int64)
    for i, replicas in enumerate(lists):
        padded[i, : len(replicas)] = replicas
    return padded, np.array([len(replicas) for replicas in lists], np.int64)


@dataclass(frozen=True)
class Route:
    """The slots that one rank sends to and receives from each other rank, and keeps. All ascending."""

    send: dict[int, Ints]
    receive: dict[int, Ints]
    keep: Ints


def route(rank: int, src: Layout, dst: Layout, old: Ints, new: Ints, topology: Topology | None = None) -> Route:
    """Derives one rank's part of the exchange from the old and the new replica of every slot."""
    src_replica, dst_replica = src.replica_of(rank), dst.replica_of(rank)
    send: dict[int, Ints] = {}
    if src_replica is not None:
        held = np.flatnonzero(old == src_replica)
        for d, slots in _split_by(held, new[held]):
            for receiver in dst.replicas[d]:
                if src.replica_of(receiver) != src_replica:
                    parts = _split_over(slots, src.replicas[src_replica], receiver, topology)
                    if rank in parts:
                        send[receiver] = parts[rank]
    receive: dict[int, Ints] = {}
    keep = np.empty(0, np.int64)
    if dst_replica is not None:
        wanted = np.flatnonzero(new == dst_replica)
        for s, slots in _split_by(wanted, old[wanted]):
            if s == src_replica:
                keep = slots
            else:
                receive |= _split_over(slots, src.replicas[s], rank, topology)
    return Route(send, receive, keep)


def _split_over(slots: Ints, replicas: tuple[int, ...], receiver: int, topology: Topology | None) -> dict[int, Ints]:
    """Returns the samples that each rank of the source replica sends: in turn, from another rank per receiver."""
    if topology:
        replicas = tuple(r for r in replicas if topology.same_host(r, receiver)) or replicas
    if len(replicas) == 1:
        return {replicas[0]: slots}
    sender = (np.arange(len(slots)) + receiver) % len(replicas)
    return {r: part for i, r in enumerate(replicas) if len(part := slots[sender == i])}


def _split_by(slots: Ints, key: Ints) -> list[tuple[int, Ints]]:
    order = np.argsort(key, kind="stable")
    slots, key = slots[order], key[order]
    bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
    return [(int(key[a]), slots[a:b]) for a, b in pairwise(bounds) if b > a]
