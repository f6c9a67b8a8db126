"""Moves fields from one partition to another, peer to peer: one small all-gather, one all-to-all.

Does no I/O: `exchange` is a generator that yields the collectives it needs and is sent their results. On a worker the
transport executes them (transport.py); tests run N of these generators against each other in one process.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.allocator import CachingAllocator
from distflow.data.balance import Ints, imbalance
from distflow.data.batch import Column
from distflow.data.collectives import SendReceive, all_gather
from distflow.data.routes import assign_cells, route
from distflow.data.wire import FlatColumn, Segments, flatten, pack, segment_size, unpack
from distflow.errors import DataError
from distflow.plan.layout import Layout
from distflow.plan.tasks import Move, Partition


@dataclass(frozen=True)
class AllGather:
    """Gathers `data`, in host memory and of the same length on all `ranks`; the result is [ranks, length]."""

    ranks: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True)
class AllToAll:
    """Sends `send` bytes to each of `ranks`, and fills `out` with `receive` bytes from each.

    `pack` writes the bytes to send, rank after rank, straight into the memory they are sent from.
    """

    ranks: tuple[int, ...]
    pack: Callable[[Tensor], None]
    send: list[int]
    out: Tensor
    receive: list[int]


Collective = AllGather | AllToAll


def only_messages(rank: int, worker: Generator[Any, Tensor, Any]) -> Generator[SendReceive, Tensor, Any]:
    """Replaces the collectives that a generator yields by messages."""
    result = None
    while True:
        try:
            wish = worker.send(result)
        except StopIteration as end:
            return end.value
        if isinstance(wish, AllGather):
            result = yield from all_gather(rank, wish.ranks, wish.data)
        elif isinstance(wish, AllToAll):
            send, receive = _ranges(wish.ranks, wish.send), _ranges(wish.ranks, wish.receive)
            result = yield SendReceive(sum(wish.send), wish.pack, send, wish.out, receive)
        else:
            result = yield wish


def _ranges(ranks: tuple[int, ...], sizes: list[int]) -> dict[int, tuple[int, int]]:
    ranges, at = {}, 0
    for r, n in zip(ranks, sizes, strict=True):
        if n:
            ranges[r] = at, at + n
        at += n
    return ranges


@dataclass(frozen=True)
class MoveResult:
    """The samples one rank has after a move, and the bytes it cost."""

    slots: Ints  # ascending; empty if the rank is not in the target
    columns: Mapping[str, Column]
    sent: int  # bytes
    received: int
    kept: int
    imbalance: float | None  # of the target's cells, if this move assigned the samples to them


def exchange(
    rank: int,
    move: Move,
    samples: int,
    group_size: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    wanted: Ints | None,
    allocator: CachingAllocator,
) -> Generator[Collective, Tensor, MoveResult]:
    """Carries out one rank's part of a move.

    `held`: the slots (ascending) and columns that this rank has in the source, None if it is not in it. `wanted`: the
    slots it has in the target, if an earlier move has assigned them.
    """
    where = f"move {move.id}"
    columns: list[FlatColumn] = []
    sizes: Ints = np.zeros(0, np.int64)  # bytes of each sample
    if held is not None:
        columns = [flatten(held[1][f], f"{where}: field '{f}'") for f in move.fields]
        sizes = np.zeros(len(held[0]), np.int64)
        for c in columns:
            sizes = sizes + c.lengths * c.item_bytes
    weights = sizes
    if move.dst.balance in move.fields and columns:
        weights = columns[move.fields.index(move.dst.balance)].lengths
    share = _share(samples, move.src, group_size)
    if move.src.uneven:  # the largest cell decides how long a header is
        counts = yield AllGather(move.ranks, torch.tensor([0 if held is None else len(held[0])], dtype=torch.int32))
        share = math.ceil(int(counts.max()) / move.src.layout.tp)
    targets = _share(samples, move.dst, group_size)
    headers = yield AllGather(move.ranks, _header(rank, move, share, targets, held, weights, sizes, wanted, where))
    old, new, size, cell_imbalance = _read_headers(headers.numpy(), move, share, samples, group_size)

    own = route(rank, move.src.layout, move.dst.layout, old, new)

    def bytes_of(slots: Ints) -> int:
        return segment_size(len(move.fields), len(slots), int(size[slots].sum()))

    send = [bytes_of(own.send[r]) if r in own.send else 0 for r in move.ranks]
    receive = [bytes_of(own.receive[r]) if r in own.receive else 0 for r in move.ranks]
    kept, total = bytes_of(own.keep), sum(receive)
    memory = allocator.empty(total + kept)

    def pack_outgoing(out: Tensor) -> None:
        if held is not None and any(send):
            parts = [own.send[r] for r in move.ranks if r in own.send]
            pack(columns, np.searchsorted(held[0], np.concatenate(parts)), _segments(parts, send), out)

    if held is not None and kept:  # samples that stay are packed straight to where they will be read
        pack(columns, np.searchsorted(held[0], own.keep), _segments([own.keep], [kept]), memory[total:])
    yield AllToAll(move.ranks, pack_outgoing, send, memory[:total], receive)
    parts = [own.receive[r] for r in move.ranks if r in own.receive]
    if kept:
        parts.append(own.keep)
    slots = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(slots)
    received = unpack(memory, _segments(parts, [*receive, kept]), move.fields, order, where) if parts else {}
    return MoveResult(slots[order], received, sum(send), total, kept, cell_imbalance)


def _segments(parts: Sequence[Ints], sizes: Sequence[int]) -> Segments:
    """Returns one segment after the other; ranks with nothing to send have size 0 and no part."""
    bounds = np.concatenate(([0], np.cumsum([n for n in sizes if n])))
    return Segments(np.array([len(slots) for slots in parts], np.int64), bounds[:-1])


def _header(
    rank: int,
    move: Move,
    share: int,
    target_share: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    weights: Ints,
    sizes: Ints,
    wanted: Ints | None,
    where: str,
) -> Tensor:
    """Returns this rank's share of what all ranks must know, as int32, padded with −1.

    (slot, weight, bytes) of each sample of its cell and, if the target is assigned already, the slots it has there.
    The ranks of a cell each describe a part of its samples.
    """
    src, dst = move.src.layout, move.dst.layout
    described = np.full((share, 3), -1, np.int32)
    if held is not None:
        part = slice(_replica(rank, src) * share, (_replica(rank, src) + 1) * share)
        entries = np.stack([held[0], weights, sizes], axis=1)[part]
        if len(entries) and int(entries.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"{where}: a sample has {int(sizes.max())} bytes in {', '.join(move.fields)}; the limit is 2 GiB"
            )
        described[: len(entries)] = entries
    if move.assigns:
        return torch.from_numpy(described.reshape(-1))
    targets = np.full(target_share, -1, np.int32)
    if wanted is not None:
        part = slice(_replica(rank, dst) * len(targets), (_replica(rank, dst) + 1) * len(targets))
        targets[: len(wanted[part])] = wanted[part]
    return torch.from_numpy(np.concatenate([described.reshape(-1), targets]))


def _read_headers(
    headers: Any, move: Move, share: int, samples: int, group_size: int
) -> tuple[Ints, Ints, Ints, float | None]:
    """Returns the old cell, new cell and bytes of every slot, and the imbalance of the new cells if it is decided here.

    All ranks have the same headers and so come to the same result.
    """
    src, dst = move.src.layout, move.dst.layout
    index = {r: i for i, r in enumerate(move.ranks)}
    entries = headers[[index[r] for r in src.ranks], : 3 * share].reshape(-1, 3).astype(np.int64)
    cell = np.repeat(np.arange(src.dp), len(entries) // src.dp)
    used = entries[:, 0] >= 0
    slot, weight, size = entries[used].T
    old, weights, sizes = (_scatter(samples, slot, v) for v in (cell[used], weight, size))
    if (old < 0).any():
        raise DataError(f"move {move.id}: no rank holds sample {int(np.flatnonzero(old < 0)[0])} of the step")
    if move.assigns:
        new = assign_cells(
            old, src, dst, weights, group_size if move.dst.whole_groups else 1, move.dst.balance is not None
        )
        return old, new, sizes, imbalance(new, weights, dst.dp)
    targets = headers[[index[r] for r in dst.ranks], 3 * share :].reshape(-1).astype(np.int64)
    cell = np.repeat(np.arange(dst.dp), len(targets) // dst.dp)
    return old, _scatter(samples, targets[targets >= 0], cell[targets >= 0]), sizes, None


def _scatter(n: int, index: Ints, values: Ints) -> Ints:
    out = np.full(n, -1, np.int64)
    out[index] = values
    return out


def _share(samples: int, partition: Partition, group_size: int) -> int:
    """Returns how many samples of a cell each of its ranks describes."""
    return math.ceil(partition.largest_share(samples, group_size) / partition.layout.tp)


def _replica(rank: int, layout: Layout) -> int:
    return layout.ranks.index(rank) % layout.tp
