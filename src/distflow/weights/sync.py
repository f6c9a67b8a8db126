"""The weight sync from one layout to another, peer to peer, in a number of messages that grows as log N.

Every rank derives from specs and layouts alone, once, what it sends and receives: nothing is negotiated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from distflow.comm.collectives import Range, SendReceive, all_gather_pieces
from distflow.comm.streams import CPU, Lanes
from distflow.plan.topology import Topology
from distflow.weights.gather import Write, pieces_per_message, tree_gather
from distflow.weights.pieces import GatheredPart, Part, PieceFormat, Resharding, Sharding
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync_group import GatherOrder, SyncGroup

# Bytes of a bucket that a weight sync takes on a rank beside the weights, at most: half is packed while the other half
# is read. On a CPU they stay in its cache, and a half takes milliseconds to copy, against which the latency of a
# message is small. On a device messages are what costs time, and there are as many buckets in flight as lanes.
_BUCKET, _DEVICE_BUCKET = 1 << 24, 1 << 29
_HOST_RADIX, _LOCAL_RADIX = 2, 8  # ranks of a host all read the same memory; a link carries a copy for each

Parts = tuple[Part, ...]
Window = tuple[int, int]  # rows [from, to) of the chunk of every source rank


@dataclass(frozen=True)
class _Outgoing:
    """The data that this rank sends to a dp group: the part, its receivers, and all senders to those receivers."""

    part: Part
    receivers: Sequence[int]
    senders: Sequence[int]
    own: bool  # this rank also needs the piece itself


@dataclass(frozen=True)
class _Gather:
    """Pieces of all `parts` come to a destination rank: some from `senders`, as their relay, the rest by all-gather."""

    parts: Parts
    senders: Sequence[int]
    order: GatherOrder


_Direct = Mapping[int, tuple[Part, int]]  # source rank → the part and the shard of its piece


@dataclass(frozen=True, slots=True)
class _Incoming:
    """The data that a destination rank receives of a bucket."""

    format: PieceFormat
    own: Part | None  # the part of the piece that this rank has itself
    path: _Direct | _Gather

    @property
    def bytes(self) -> int:
        """Returns the size of the buffer: of all pieces, or of the pieces from other ranks."""
        return (self.path.order.total if isinstance(self.path, _Gather) else len(self.path)) * self.format.bytes

    def ranges(self) -> dict[int, Range]:
        """Returns which bytes of the buffer each rank sends."""
        if isinstance(self.path, _Gather):
            senders, first = list(self.path.senders), int(self.own is not None)
            width = pieces_per_message(len(senders))
        else:
            senders, first, width = list(self.path), 0, 1
        ends = [(first + k) * self.format.bytes for k in (*range(0, len(senders), width), len(senders))]
        return dict(zip(senders[::width], pairwise(ends), strict=True))


@dataclass(frozen=True, slots=True)
class _Bucket:
    specs: Sequence[TensorSpec]
    outgoing: Sequence[tuple[PieceFormat, _Outgoing]]
    incoming: _Incoming | None

    @property
    def reads(self) -> bool:
        """Returns whether this rank needs its weights in the source layout."""
        return bool(self.outgoing or (self.incoming and self.incoming.own))


class WeightSync:
    """Moves weights from the ranks of `source` to those of `destination`, which are not sharded; all drive `run`."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        source: Shards,
        destination: Shards,
        rank: int,
        dtype: torch.dtype,
        topology: Topology,
        device: torch.device = CPU,
    ) -> None:
        assert destination.shard == 1
        self._lanes = Lanes(device)
        self._bucket_bytes = _BUCKET if device == CPU else _DEVICE_BUCKET
        self.rank, self.dtype, self.destination = rank, dtype, destination
        self.group = SyncGroup.of(rank, source, destination.layout, topology)
        self.resharding = Resharding.of(source, destination)
        self.shard = (self.group.source_index or 0) // self.resharding.source_tp  # of a source rank
        self._routes_of, self._path_of = cache(self._routes), cache(self._path)
        self._gathered_on = cache(self._gathered)
        self.buckets = list(self._buckets(specs))

    def run(self, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> Iterator[SendReceive]:
        """Fills `filled`, this rank's parameters in the destination layout, from all ranks' `held` in the source's.

        A tensor of `held` is looked up when the first of it is sent, and once: it may be computed then.
        """
        given: dict[str, Tensor] = {}
        lanes = self._lanes
        # One memory for all buckets of a lane: to fault its pages in costs as much as to fill it.
        size = max((b.incoming.bytes for b in self.buckets if b.incoming), default=0) if filled else 0
        memory = [torch.empty(size, dtype=torch.uint8, device=lanes.device) for _ in range(len(lanes))]
        read: list[object] = [None] * len(lanes)  # what a lane may still read
        for lane, bucket in zip(cycle(range(len(lanes))), self.buckets, strict=False):
            lanes.await_last(lane)
            given = {spec.name: given[spec.name] for spec in bucket.specs if spec.name in given}
            if bucket.reads:
                given |= {spec.name: held[spec.name] for spec in bucket.specs if spec.name not in given}
            read[lane] = given
            if bucket.reads or bucket.incoming:
                with lanes.use(lane):
                    yield from self._move(bucket, given, filled, memory[lane])
        for lane in range(len(lanes)):
            lanes.await_last(lane)

    def _move(
        self, bucket: _Bucket, held: Mapping[str, Tensor], filled: Mapping[str, Tensor], memory: Tensor
    ) -> Iterator[SendReceive]:
        incoming, receive, take = bucket.incoming, dict[int, Range](), None
        device = next(iter((held or filled).values())).device
        data = memory[: incoming.bytes] if incoming else torch.empty(0, dtype=torch.uint8, device=device)
        if incoming:
            receive, own = incoming.ranges(), incoming.own
            if isinstance(incoming.path, Mapping):
                take = partial(_unpack, incoming.format, incoming.path, filled)
                if own:
                    incoming.format.copy(own, self.shard, held, filled)
            elif own:
                incoming.format.pack(own, self.shard, held, data[: incoming.format.bytes])
        size, send, writes = 0, dict[int, Range](), list[tuple[int, int, Write]]()
        for format_, out in bucket.outgoing:
            write = partial(format_.pack, out.part, self.shard, held)
            place = out.senders.index(self.rank)
            collected = yield from tree_gather(out.senders, place, format_.bytes, write, device)
            if collected:
                end = size + collected[0] * format_.bytes
                send |= dict.fromkeys(out.receivers, (size, end))
                writes.append((size, end, collected[1]))
                size = end
        if send or receive:
            yield SendReceive(size, partial(_write_all, writes), send, data, receive, take)
        if incoming and isinstance(incoming.path, _Gather):
            unit, order = incoming.format.bytes, incoming.path.order
            yield from self._all_gather(order, unit, data)
            parts = self._gathered_on(incoming.path.parts, device)
            incoming.format.unpack_all(parts, data.view(order.total, unit), filled)

    def _all_gather(self, order: GatherOrder, unit: int, data: Tensor) -> Iterator[SendReceive]:
        """Gathers the pieces that other ranks of the dp group have, first from other hosts, then within the host."""
        group = self.group.own_dp_group
        host, local = group.host_and_local_rank(self.rank)
        if local < group.rails:
            yield from all_gather_pieces(group.rail_ranks(local), host, order.rail, unit, data, _HOST_RADIX)
        yield from all_gather_pieces(group.host_ranks(host), local, order.host, unit, data, _LOCAL_RADIX)

    def _gathered(self, parts: Parts, device: torch.device) -> list[GatheredPart]:
        path = self._path_of(parts)
        assert isinstance(path, _Gather)
        return [self.resharding.gathered(part, path.order.position, device) for part in parts]

    def _buckets(self, specs: Sequence[TensorSpec]) -> Iterator[_Bucket]:
        numbers = cycle(range(self.resharding.source_tp))
        for sharding, together, windows in self._divide(specs):
            offsets = [self.resharding.row_offsets(together, t) for t in range(len(self.group.dp_groups))]
            for window, number in zip(windows, numbers, strict=False):
                outgoing, incoming = [], None
                for t, out, path in self._routes_of(sharding, number):
                    format_ = PieceFormat(together, self.dtype, self.resharding, t, window, offsets[t])
                    if out and out.receivers:
                        outgoing.append((format_, out))
                    if path is not None:
                        incoming = _Incoming(format_, out.part if out and out.own else None, path)
                yield _Bucket(together, outgoing, incoming)

    def _divide(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[Sharding, list[TensorSpec], list[Window]]]:
        """Yields the parameters of each bucket and the windows of their rows: large parameters go in several.

        The parameters of a bucket are cut alike, so all source ranks have pieces of the same size.
        """
        # A gather needs memory for what is received and for what is passed on.
        limit = self._bucket_bytes // (2 if all(g.direct for g in self.group.dp_groups if g) else 4)
        limit = max(1, limit * min(8, max(1, len(self.group.sources) // 128)))  # avoids tiny messages of many senders
        alike: dict[Sharding, list[TensorSpec]] = {}
        for spec in specs:
            if prod(spec.shape):
                alike.setdefault(Sharding.of(spec, self.destination), []).append(spec)
        for sharding, specs_alike in alike.items():
            chunk, bucket, size = self.resharding.chunk(sharding), list[TensorSpec](), 0
            copies = self.resharding.destination_tp if sharding.replicated and not sharding.block else 1
            for spec in specs_alike:
                whole = prod(spec.shape) * self.dtype.itemsize * copies
                if bucket and size + whole > limit:
                    yield sharding, bucket, [(0, chunk)]
                    bucket, size = [], 0
                if whole > limit:
                    rows = -(-chunk // -(-whole // limit))
                    yield sharding, [spec], [(row, min(row + rows, chunk)) for row in range(0, chunk, rows)]
                else:
                    bucket.append(spec)
                    size += whole
            if bucket:
                yield sharding, bucket, [(0, chunk)]

    def _routes(self, sharding: Sharding, bucket: int) -> list[tuple[int, _Outgoing | None, _Direct | _Gather | None]]:
        """Returns, for each dp group that this rank sends to or is in, what it sends and how pieces come to it."""
        found: list[tuple[int, _Outgoing | None, _Direct | _Gather | None]] = []
        for t, group in enumerate(self.group.dp_groups):
            parts = self.resharding.parts(sharding, t, bucket) if group else ()
            outgoing = self._outgoing(t, parts) if parts else None
            if outgoing or (parts and t == self.group.tp_rank):
                found.append((t, outgoing, self._path_of(parts) if t == self.group.tp_rank else None))
        return found

    def _outgoing(self, t: int, parts: Parts) -> _Outgoing | None:
        """Returns what this rank sends to a dp group: to all of its ranks, or to the relay."""
        group, index = self.group.dp_groups[t], self.group.source_index
        active = self.resharding.active(parts)
        if group is None or index is None or not active[index]:
            return None
        part = next(p for p in parts if p.source_tp_rank == index % self.resharding.source_tp)
        if group.direct:
            receivers, senders = group.ranks.tolist(), [self.rank]
        else:
            receivers, senders = [group.relay_of(index)], group.senders(int(group.relays[index]), active)
        return _Outgoing(part, [r for r in receivers if r != self.rank], senders, self.rank in receivers)

    def _path(self, parts: Parts) -> _Direct | _Gather:
        """Returns how pieces come to this rank, a destination rank."""
        active, group = self.resharding.active(parts), self.group.own_dp_group
        if not group.direct:
            host, local = group.host_and_local_rank(self.rank)
            senders = group.senders(host * group.rails + local, active) if local < group.rails else []
            return _Gather(parts, senders, group.gather_order(self.rank, active))
        by_tp_rank, tp = {part.source_tp_rank: part for part in parts}, self.resharding.source_tp
        pieces = {int(self.group.sources[i]): (by_tp_rank[i % tp], i // tp) for i in np.flatnonzero(active).tolist()}
        return {rank: piece for rank, piece in pieces.items() if rank != self.rank}


def _unpack(format_: PieceFormat, path: _Direct, filled: Mapping[str, Tensor], source: int, memory: Tensor) -> None:
    format_.unpack(*path[source], memory, filled)


def _write_all(writes: Sequence[tuple[int, int, Write]], out: Tensor) -> None:
    for begin, end, write in writes:
        write(out[begin:end])
