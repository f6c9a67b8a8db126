"""Move fields from one partition to another, peer to peer: one small all-gather, one all-to-all.

Written without I/O: `exchange` yields the collectives it needs and is sent their results. A worker drives it over
`torch.distributed` (comm.py); tests drive N of them against each other in one process.
"""

import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints, imbalance
from distflow.data.batch import Column
from distflow.data.routes import deal, route
from distflow.data.wire import Segments, read, segment_size, strip, write
from distflow.errors import DataError
from distflow.plan.layout import Layout
from distflow.plan.tasks import Move


@dataclass(frozen=True)
class AllGather:
    """Everybody's `data` (equally long everywhere), as rows in the order of `ranks`."""

    ranks: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class AllToAll:
    """Send each of `ranks` its `send` bytes, which `pack` writes one after the other to where they are sent from;
    `out` is filled with `receive` bytes from each."""

    ranks: tuple[int, ...]
    pack: Callable[[Tensor], None]
    send: list[int]
    out: Tensor
    receive: list[int]


Collective = AllGather | AllToAll
Steps = Generator[Collective, Tensor, Any]


@dataclass(frozen=True)
class Moved:
    """What one rank has after a move, and what it cost."""

    slots: Ints  # ascending; empty if the rank is not in the target
    columns: Mapping[str, Column]
    sent: int  # bytes
    received: int
    kept: int
    imbalance: float | None  # of the target's cells, where this move dealt the samples


class Slabs:
    """Memory for what is received, used again when nobody holds a view of it: fresh memory is as slow as sending."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._pool: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def slab(self, size: int) -> Tensor:
        """It belongs to the columns that are views of it."""
        if self.device.type != "cpu":  # the device's own allocator keeps what is freed
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        # Two references are the pool's own and getrefcount's argument: any more is a living tensor.
        free = [i for i in range(len(self._pool)) if sys.getrefcount(self._pool[i]) == 2 and len(self._pool[i]) >= size]
        if free:
            array = self._pool[min(free, key=lambda i: len(self._pool[i]))]
        else:
            self.trim()
            array = np.empty(size, np.uint8)
            self._pool.append(array)
        return torch.from_numpy(array)[:size]

    def trim(self) -> None:
        """Give back to the system what nobody uses."""
        self._pool = [self._pool[i] for i in range(len(self._pool)) if sys.getrefcount(self._pool[i]) > 2]


def exchange(
    rank: int,
    move: Move,
    samples: int,
    group: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    wanted: Ints | None,
    slabs: Slabs,
) -> Generator[Collective, Tensor, Moved]:
    """One rank's part of a move.

    `held`: the slots (ascending) and columns this rank has in the source, None if it is not there. `wanted`: the slots
    it takes in the target, where an earlier move has dealt them.
    """
    where = f"move {move.id}"
    strips = [] if held is None else [strip(held[1][f], f"{where}: field '{f}'", slabs.device) for f in move.fields]
    sizes: Ints = np.zeros(0 if held is None else len(held[0]), np.int64)
    for s in strips:
        sizes = sizes + s.lengths * s.row
    weights = sizes
    if move.dst.balance in move.fields and strips:
        weights = strips[move.fields.index(move.dst.balance)].lengths
    share = _share(samples, move.src.layout)
    if move.src.uneven:  # then who has most has to be asked
        counts = yield AllGather(move.ranks, torch.tensor([0 if held is None else len(held[0])], dtype=torch.int32))
        share = math.ceil(int(counts.max()) / move.src.layout.tp)
    gathered = yield AllGather(move.ranks, _header(rank, move, share, samples, held, weights, sizes, wanted, where))
    owner, new, size, cell_imbalance = _agree(gathered.cpu().numpy(), move, share, samples, group)

    mine = route(rank, move.src.layout, move.dst.layout, owner, new)

    def bytes_of(slots: Ints) -> int:
        return segment_size(len(move.fields), len(slots), int(size[slots].sum()))

    send = [bytes_of(mine.send[r]) if r in mine.send else 0 for r in move.ranks]
    receive = [bytes_of(mine.receive[r]) if r in mine.receive else 0 for r in move.ranks]
    kept, total = bytes_of(mine.keep), sum(receive)
    slab = slabs.slab(total + kept)

    def pack(out: Tensor) -> None:
        if held is not None and any(send):
            to = [mine.send[r] for r in move.ranks if r in mine.send]
            write(strips, np.searchsorted(held[0], np.concatenate(to)), _segments(to, send), out)

    if held is not None and kept:  # what stays is packed straight to where it will be read
        write(strips, np.searchsorted(held[0], mine.keep), _segments([mine.keep], [kept]), slab[total:])
    yield AllToAll(move.ranks, pack, send, slab[:total], receive)
    got = [mine.receive[r] for r in move.ranks if r in mine.receive]
    if kept:
        got.append(mine.keep)
    slots = np.concatenate(got) if got else np.empty(0, np.int64)
    order = np.argsort(slots)
    columns = read(slab, _segments(got, [*receive, kept]), move.fields, order, where) if got else {}
    return Moved(slots[order], columns, sum(send), total, kept, cell_imbalance)


def _segments(slots: Sequence[Ints], sizes: Sequence[int]) -> Segments:
    """Segments one after the other; ranks that get nothing have size 0 and no slots."""
    bounds = np.concatenate(([0], np.cumsum([n for n in sizes if n])))
    return Segments(np.array([len(s) for s in slots], np.int64), bounds[:-1])


def _header(
    rank: int,
    move: Move,
    share: int,
    samples: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    weights: Ints,
    sizes: Ints,
    wanted: Ints | None,
    where: str,
) -> Tensor:
    """This rank's share of what everybody must know, int32: slot, weight, bytes of each sample of its cell, and, where
    the target is dealt already, the slots it takes. Replicas share the telling."""
    src, dst = move.src.layout, move.dst.layout
    told = np.full((share, 3), -1, np.int32)
    if held is not None:
        part = slice(_replica(rank, src) * len(told), (_replica(rank, src) + 1) * len(told))
        rows = np.stack([held[0], weights, sizes], axis=1)[part]
        if len(rows) and int(rows.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"{where}: a sample has {int(sizes.max())} bytes in {', '.join(move.fields)}; the limit is 2 GiB"
            )
        told[: len(rows)] = rows
    if move.deals:
        return torch.from_numpy(told.reshape(-1))
    takes = np.full(_share(samples, dst), -1, np.int32)
    if wanted is not None:
        part = slice(_replica(rank, dst) * len(takes), (_replica(rank, dst) + 1) * len(takes))
        takes[: len(wanted[part])] = wanted[part]
    return torch.from_numpy(np.concatenate([told.reshape(-1), takes]))


def _agree(heads: Any, move: Move, share: int, samples: int, group: int) -> tuple[Ints, Ints, Ints, float | None]:
    """From everybody's header: old cell, new cell and bytes of every slot; and how even the new cells are."""
    src, dst = move.src.layout, move.dst.layout
    at = {r: i for i, r in enumerate(move.ranks)}
    told = heads[[at[r] for r in src.ranks], : 3 * share].reshape(-1, 3).astype(np.int64)
    cell = np.repeat(np.arange(src.dp), len(told) // src.dp)
    real = told[:, 0] >= 0
    slot, weight, size = told[real].T
    owner, weights, sizes = (_scatter(samples, slot, v) for v in (cell[real], weight, size))
    if (owner < 0).any():
        raise DataError(f"move {move.id}: sample {int(np.flatnonzero(owner < 0)[0])} of the step is held by nobody")
    if move.deals:
        new = deal(owner, src, dst, weights, group if move.dst.whole else 1, move.dst.balance is not None)
        return owner, new, sizes, imbalance(new, weights, dst.dp)
    takes = heads[[at[r] for r in dst.ranks], 3 * share :].reshape(-1).astype(np.int64)
    cell = np.repeat(np.arange(dst.dp), len(takes) // dst.dp)
    return owner, _scatter(samples, takes[takes >= 0], cell[takes >= 0]), sizes, None


def _scatter(n: int, index: Ints, values: Ints) -> Ints:
    out = np.full(n, -1, np.int64)
    out[index] = values
    return out


def _share(samples: int, layout: Layout) -> int:
    """Samples of a cell that each of its replicas tells about."""
    return math.ceil(math.ceil(samples / layout.dp) / layout.tp)


def _replica(rank: int, layout: Layout) -> int:
    return layout.ranks.index(rank) % layout.tp
