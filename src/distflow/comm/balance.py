"""Balances weights over replicas without changing the number of units per replica. Pure NumPy, exact integers."""

import heapq

import numpy as np
from numpy.typing import NDArray

from distflow.util.arrays import Ints

TOLERANCE = 0.01  # (max − min) / mean that counts as balanced, as further swaps would only cost bytes


def assign_evenly(units: Ints, weights: Ints, capacity: Ints, load: Ints) -> Ints:
    """Assigns a replica to each unit: longest processing time first, with a limit of units per replica.

    In every round each replica with capacity left takes one unit, the least loaded replica the heaviest one.
    Updates `capacity` (units a replica can still take) and `load` (the weight of a replica) in place.
    """
    replica = np.empty(len(units), np.int64)
    todo = np.argsort(-weights[units], kind="stable")
    while len(todo):
        open_replicas = np.flatnonzero(capacity)
        receivers = open_replicas[np.argsort(load[open_replicas], kind="stable")][: len(todo)]
        heaviest, todo = todo[: len(receivers)], todo[len(receivers) :]
        replica[heaviest] = receivers
        capacity[receivers] -= 1
        load[receivers] += weights[units[heaviest]]
    return replica


def rebalance(replica: Ints, weights: Ints, replicas: int, movable: NDArray[np.bool_]) -> Ints:
    """Swaps movable units of the most and the least loaded replica until all are within TOLERANCE or no swap helps.

    Returns the new replica of each unit. Few units change their replica.
    """
    replica = replica.copy()
    load = np.bincount(replica, weights, replicas).astype(np.int64).tolist()
    members = _members(replica, replicas, movable)
    active = {c for c in range(replicas) if len(members[c])}
    total = sum(load[c] for c in active)
    slack = TOLERANCE * sum(load) / replicas
    # Entries of replicas whose load has changed since are out of date, and skipped.
    highest, lowest = [(-load[c], c) for c in active], [(load[c], c) for c in active]
    heapq.heapify(highest)
    heapq.heapify(lowest)
    while len(active) > 1:
        while highest[0][1] not in active or -highest[0][0] != load[highest[0][1]]:
            heapq.heappop(highest)
        while lowest[0][1] not in active or lowest[0][0] != load[lowest[0][1]]:
            heapq.heappop(lowest)
        high, low = highest[0][1], lowest[0][1]
        gap = load[high] - load[low]
        if gap <= slack:
            break
        # Swapping a for b narrows the gap by 2(a − b); best is a − b = gap / 2.
        difference = weights[members[high]][:, None] - weights[members[low]][None, :]
        miss = np.abs(2 * difference - gap)
        i, j = np.unravel_index(int(np.argmin(miss)), miss.shape)
        if miss[i, j] >= gap:  # no swap of these two helps: leave the one further from the mean as it is
            mean = total / len(active)
            passive = high if load[high] - mean >= mean - load[low] else low
            active.remove(passive)
            total -= load[passive]
            continue
        a, b = members[high][i], members[low][j]
        members[high][i], members[low][j] = b, a
        replica[a], replica[b] = low, high
        load[high] -= int(difference[i, j])
        load[low] += int(difference[i, j])
        for c in (high, low):
            heapq.heappush(highest, (-load[c], c))
            heapq.heappush(lowest, (load[c], c))
    return replica


def imbalance(replica: Ints, weights: Ints, replicas: int) -> float:
    """Returns (max − min) / mean of the weight per replica."""
    load = np.bincount(replica, weights, replicas)
    mean = float(load.mean())
    return float(load.max() - load.min()) / mean if mean else 0.0


def _members(replica: Ints, replicas: int, movable: NDArray[np.bool_]) -> list[Ints]:
    units = np.flatnonzero(movable)
    order = units[np.argsort(replica[units], kind="stable")]
    return np.split(order, np.searchsorted(replica[order], np.arange(1, replicas)))
