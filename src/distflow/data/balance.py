"""Balances weights over cells without changing the number of units per cell. Pure NumPy, exact integers."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

TOLERANCE = 0.01  # (max − min) / mean that counts as balanced; further swaps would only cost bytes


def assign_evenly(units: Ints, weights: Ints, capacity: Ints, load: Ints) -> Ints:
    """Assigns a cell to each unit: longest processing time first, with a limit of units per cell.

    In every round each cell with capacity left takes one unit, the least loaded cell the heaviest one.
    Updates `capacity` (units a cell can still take) and `load` (the weight of a cell) in place.
    """
    cell = np.empty(len(units), np.int64)
    todo = np.argsort(-weights[units], kind="stable")
    while len(todo):
        open_cells = np.flatnonzero(capacity)
        takers = open_cells[np.argsort(load[open_cells], kind="stable")][: len(todo)]
        heaviest, todo = todo[: len(takers)], todo[len(takers) :]
        cell[heaviest] = takers
        capacity[takers] -= 1
        load[takers] += weights[units[heaviest]]
    return cell


def rebalance(cell: Ints, weights: Ints, cells: int, movable: NDArray[np.bool_]) -> Ints:
    """Swaps movable units between the most and the least loaded cell until all are within TOLERANCE or no swap helps.

    Returns the new cell of each unit. Only as many units change their cell as the balance needs.
    """
    cell = cell.copy()
    load = np.bincount(cell, weights, cells).astype(np.int64)
    members = _members(cell, cells, movable)
    active = np.array([len(m) > 0 for m in members])
    slack = TOLERANCE * load.mean()
    while active.sum() > 1:
        high = int(np.argmax(np.where(active, load, -1)))
        low = int(np.argmin(np.where(active, load, np.iinfo(np.int64).max)))
        gap = int(load[high] - load[low])
        if gap <= slack:
            break
        # Swapping a for b narrows the gap by 2(a − b); best is a − b = gap / 2.
        difference = weights[members[high]][:, None] - weights[members[low]][None, :]
        miss = np.abs(2 * difference - gap)
        i, j = np.unravel_index(int(np.argmin(miss)), miss.shape)
        if miss[i, j] >= gap:  # no swap of these two helps: leave the one further from the mean as it is
            mean = load[active].mean()
            active[high if load[high] - mean >= mean - load[low] else low] = False
            continue
        a, b = members[high][i], members[low][j]
        members[high][i], members[low][j] = b, a
        cell[a], cell[b] = low, high
        load[high] -= difference[i, j]
        load[low] += difference[i, j]
    return cell


def imbalance(cell: Ints, weights: Ints, cells: int) -> float:
    """Returns (max − min) / mean of the weight per cell."""
    load = np.bincount(cell, weights, cells)
    mean = float(load.mean())
    return float(load.max() - load.min()) / mean if mean else 0.0


def _members(cell: Ints, cells: int, movable: NDArray[np.bool_]) -> list[Ints]:
    units = np.flatnonzero(movable)
    order = units[np.argsort(cell[units], kind="stable")]
    return np.split(order, np.searchsorted(cell[order], np.arange(1, cells)))
