"""Moves fields from one partition to another, peer to peer: sizes are agreed first, then all columns go in one message.

All routes follow from the replica of each sample before and after. One small all-gather distributes this assignment
unless all ranks know it; then only sizes go to the receivers. Does no I/O: `exchange` is a generator that yields the
messages it needs. On a worker the transport executes them (transport.py); tests run N of them in one process.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Column
from distflow.comm.allocator import CachingAllocator
from distflow.comm.balance import imbalance
from distflow.comm.collectives import Communication, Range, SendReceive, all_gather_by_host
from distflow.comm.routes import assign_replicas, route
from distflow.comm.wire import FlatColumn, Packing, Segments, flatten, pack, segment_size, unpack
from distflow.errors import DataError
from distflow.plan.layout import Layout
from distflow.plan.tasks import Move, Partition
from distflow.plan.topology import Topology
from distflow.util.arrays import Ints


@dataclass(frozen=True)
class Assignment:
    """The replica of each slot, before and after a move."""

    old: Ints
    new: Ints


@dataclass(frozen=True)
class MoveResult:
    """The samples of one rank after a move, the bytes it cost, and the assignment, which all its ranks now know."""

    slots: Ints  # ascending; empty if the rank is not in the target
    columns: Mapping[str, Column]
    assignment: Assignment
    sent: int  # bytes
    received: int
    kept: int
    imbalance: float | None  # of the target's replicas, if this move assigned the samples to them


def exchange(
    rank: int,
    move: Move,
    samples: int,
    group_size: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    wanted: Ints | None,
    allocator: CachingAllocator,
    topology: Topology | None = None,
    assignment: Assignment | None = None,
) -> Communication[MoveResult]:
    """Carries out one rank's part of a move.

    `held`: slots (ascending) and columns of this rank in the source, if it is in it. `wanted`: its slots in the target,
    if an earlier move has assigned them. `assignment`: set if all ranks of the move know it.
    """
    where = f"move {move.id}"
    columns: list[FlatColumn] = []
    sizes: Ints = np.zeros(0, np.int64)  # bytes of each sample
    if held is not None:
        columns = [flatten(held[1][f], f"{where}: field '{f}'") for f in move.fields]
        sizes = np.zeros(len(held[0]), np.int64)
        for c in columns:
            sizes = sizes + c.lengths * c.item_bytes
    known, replica_imbalance = assignment is not None, None
    if assignment is None:
        assignment, size, replica_imbalance = yield from _agree(
            rank, move, samples, group_size, held, columns, sizes, wanted, topology
        )
    else:
        size = _scatter(samples, held[0], sizes) if held is not None else sizes
    own = route(rank, move.src.layout, move.dst.layout, assignment.old, assignment.new, topology)

    def bytes_of(slots: Ints) -> int:
        return segment_size(len(move.fields), len(slots), int(size[slots].sum()))

    send = {r: bytes_of(slots) for r, slots in own.send.items()}
    if known:
        receive = yield from _tell_sizes(send, list(own.receive))
    else:
        receive = {r: bytes_of(slots) for r, slots in own.receive.items()}
    kept, total = bytes_of(own.keep), sum(receive.values())
    memory = allocator.empty(total + kept)

    packing, place = None, {r: k for k, r in enumerate(send)}
    if held is not None and send:
        parts = list(own.send.values())
        slots = np.searchsorted(held[0], np.concatenate(parts))
        packing = Packing(columns, slots, _segments(parts, list(send.values())))

    def write(out: Tensor) -> None:
        assert packing is not None
        packing.write(out)

    def pieces(peer: int) -> list[memoryview]:
        assert packing is not None
        return packing.pieces(place[peer])

    if held is not None and kept:  # samples that stay are packed straight to their final place
        pack(columns, np.searchsorted(held[0], own.keep), _segments([own.keep], [kept]), memory[total:])
    long = packing is not None and packing.in_long_ranges
    yield SendReceive(
        sum(send.values()),
        write,
        _ranges(send),
        memory[:total],
        _ranges(receive),
        pieces=pieces if long else None,
    )
    parts = [*own.receive.values(), *([own.keep] if kept else [])]
    slots = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(slots)
    segments = _segments(parts, [*receive.values(), *([kept] if kept else [])])
    received = unpack(memory, segments, move.fields, order, where) if parts else {}
    return MoveResult(slots[order], received, assignment, sum(send.values()), total, kept, replica_imbalance)


def _ranges(sizes: Mapping[int, int]) -> dict[int, Range]:
    """Returns one range after the other."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {r: (end - n, end) for (r, n), end in zip(sizes.items(), ends, strict=True)}


def _segments(parts: Sequence[Ints], sizes: Sequence[int]) -> Segments:
    """Returns one segment after the other."""
    ends = np.cumsum(sizes, dtype=np.int64)
    return Segments(np.array([len(slots) for slots in parts], np.int64), ends - np.array(sizes, np.int64))


def _tell_sizes(send: Mapping[int, int], senders: Sequence[int]) -> Communication[dict[int, int]]:
    """Sends each receiver the size of its message; returns the size of each sender's."""
    outgoing = torch.tensor(list(send.values()), dtype=torch.int64).view(torch.uint8)
    incoming = torch.empty(len(senders), dtype=torch.int64)
    yield SendReceive(
        len(outgoing),
        lambda out: out.copy_(outgoing),
        _ranges(dict.fromkeys(send, 8)),
        incoming.view(torch.uint8),
        _ranges(dict.fromkeys(senders, 8)),
    )
    return dict(zip(senders, incoming.tolist(), strict=True))


def _agree(
    rank: int,
    move: Move,
    samples: int,
    group_size: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    columns: Sequence[FlatColumn],
    sizes: Ints,
    wanted: Ints | None,
    topology: Topology | None,
) -> Communication[tuple[Assignment, Ints, float | None]]:
    """Returns the assignment, the bytes of every slot, and the imbalance of the new replicas if they are decided here.

    All ranks have the same headers and so come to the same result.
    """
    weights = sizes
    if move.dst.balance in move.fields and columns:
        weights = columns[move.fields.index(move.dst.balance)].lengths
    share = _share(samples, move.src, group_size)
    if move.src.uneven:  # the largest replica decides how long a header is
        count = torch.tensor([0 if held is None else len(held[0])])
        counts = yield from all_gather_by_host(rank, move.ranks, count, topology)
        share = math.ceil(int(counts.max()) / move.src.layout.replica_size)
    targets = _share(samples, move.dst, group_size)
    header = _header(rank, move, share, targets, held, weights, sizes, wanted)
    headers = yield from all_gather_by_host(rank, move.ranks, header, topology)
    return _read_headers(headers.numpy(), move, share, samples, group_size)


def _header(
    rank: int,
    move: Move,
    share: int,
    target_share: int,
    held: tuple[Ints, Mapping[str, Column]] | None,
    weights: Ints,
    sizes: Ints,
    wanted: Ints | None,
) -> Tensor:
    """Returns this rank's part of the metadata of a move, as int32, padded with −1.

    It has (slot, weight, bytes) of samples of its replica and, if the target is assigned, the rank's slots there.
    The ranks of a replica each describe a part of its samples.
    """
    src, dst = move.src.layout, move.dst.layout
    described = np.full((share, 3), -1, np.int32)
    if held is not None:
        part = slice(_replica(rank, src) * share, (_replica(rank, src) + 1) * share)
        entries = np.stack([held[0], weights, sizes], axis=1)[part]
        if len(entries) and int(entries.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"move {move.id}: a sample has {int(sizes.max())} bytes in {', '.join(move.fields)}; the limit is 2 GiB"
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
) -> tuple[Assignment, Ints, float | None]:
    src, dst = move.src.layout, move.dst.layout
    index = {r: i for i, r in enumerate(move.ranks)}
    entries = headers[[index[r] for r in src.ranks], : 3 * share].reshape(-1, 3).astype(np.int64)
    replica = np.repeat(np.arange(src.dp), len(entries) // src.dp)
    used = entries[:, 0] >= 0
    slot, weight, size = entries[used].T
    old, weights, sizes = (_scatter(samples, slot, v) for v in (replica[used], weight, size))
    if (old < 0).any():
        raise DataError(f"move {move.id}: no rank holds sample {int(np.flatnonzero(old < 0)[0])} of the step")
    if move.assigns:
        new = assign_replicas(
            old, src, dst, weights, group_size if move.dst.whole_groups else 1, move.dst.balance is not None
        )
        return Assignment(old, new), sizes, imbalance(new, weights, dst.dp)
    targets = headers[[index[r] for r in dst.ranks], 3 * share :].reshape(-1).astype(np.int64)
    replica = np.repeat(np.arange(dst.dp), len(targets) // dst.dp)
    return Assignment(old, _scatter(samples, targets[targets >= 0], replica[targets >= 0])), sizes, None


def _scatter(n: int, index: Ints, values: Ints) -> Ints:
    out = np.full(n, -1, np.int64)
    out[index] = values
    return out


def _share(samples: int, partition: Partition, group_size: int) -> int:
    """Returns the number of samples that each rank of a replica describes."""
    return math.ceil(partition.largest_share(samples, group_size) / partition.layout.replica_size)


def _replica(rank: int, layout: Layout) -> int:
    replica = layout.replica_of(rank)
    assert replica is not None
    return layout.replicas[replica].index(rank)
