"""The weight sync from one layout to another, peer to peer, in a number of messages that grows as log N.

Everybody derives from specs and layouts alone, once, what it sends and what it receives: nothing is negotiated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from math import prod

import numpy as np
import torch
from torch import Tensor

from distflow.comm.collectives import Range, SendReceive, all_gather_pieces
from distflow.plan.topology import Topology
from distflow.weights.columns import Route, Zone
from distflow.weights.pieces import Arrival, Cut, Cuts, Part, Segment
from distflow.weights.relay import Write, collect, pieces_per_message
from distflow.weights.shards import Shards, Spec

# Bytes that a weight sync takes on a rank beside the weights, at most: half is packed while the other half is read.
# They stay in a CPU's cache, and a half takes milliseconds to copy, against which the latency of a message is small.
_BUCKET = 1 << 24
_HOST_RADIX, _LOCAL_RADIX = 2, 8  # ranks of a host all read the same memory; a link carries a copy for each

Parts = tuple[Part, ...]
Window = tuple[int, int]  # rows [from, to) of every giver's chunk


@dataclass(frozen=True)
class _Given:
    """The part of which a rank gives pieces to a column, to whom, and all who send to these; `kept`: also to itself."""

    part: Part
    takers: Sequence[int]
    senders: Sequence[int]
    kept: bool


@dataclass(frozen=True)
class _Relay:
    """Pieces of all `parts` come to a taker: some from `senders`, as their entry, the rest from other takers."""

    parts: Parts
    senders: Sequence[int]
    route: Route


_Direct = Mapping[int, tuple[Part, int]]  # giver → the part of which it has a piece, and its shard


@dataclass(frozen=True, slots=True)
class _Share:
    """What a taker gets of a bucket, how, and of which part it gives the pieces itself."""

    segment: Segment
    kept: Part | None
    way: _Direct | _Relay

    @property
    def size(self) -> int:
        """Returns the elements that come, or are kept to be passed on."""
        pieces = self.way.route.total if isinstance(self.way, _Relay) else len(self.way)
        return pieces * self.segment.size


@dataclass(frozen=True, slots=True)
class _Bucket:
    specs: Sequence[Spec]
    gifts: Sequence[tuple[Segment, _Given]]
    share: _Share | None

    @property
    def gives(self) -> bool:
        return bool(self.gifts or (self.share and self.share.kept))


class WeightSync:
    """Moves weights from the ranks of `source` to those of `target`, which are not sharded. All of them drive `run`."""

    def __init__(
        self,
        specs: Sequence[Spec],
        source: Shards,
        target: Shards,
        rank: int,
        dtype: torch.dtype,
        topology: Topology,
    ) -> None:
        assert target.shard == 1
        self.rank, self.dtype, self.target = rank, dtype, target
        self.zone, self.cuts = Zone.of(rank, source, target.layout, topology), Cuts.of(source, target)
        self._columns_of, self._way_of = cache(self._columns), cache(self._way)
        self._arrivals_on = cache(self._arrivals)
        self.buckets = list(self._buckets(specs))

    def run(self, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> Iterator[SendReceive]:
        """Fills `filled`, this rank's parameters in the target layout, from everybody's `held` in the source layout.

        A tensor of `held` is looked up when the first of it is sent, and once: it may be computed then.
        """
        given: dict[str, Tensor] = {}
        memory = torch.empty(0, dtype=torch.uint8)
        if filled:  # one memory for all buckets: to fault its pages in costs as much as to fill it
            size = max((b.share.size for b in self.buckets if b.share), default=0)
            device = next(iter(filled.values())).device
            memory = torch.empty(size * self.dtype.itemsize, dtype=torch.uint8, device=device)
        for bucket in self.buckets:
            given = {spec.name: given[spec.name] for spec in bucket.specs if spec.name in given}
            if bucket.gives:
                given |= {spec.name: held[spec.name] for spec in bucket.specs if spec.name not in given}
            if bucket.gives or bucket.share:
                yield from self._move(bucket, given, filled, memory)

    def _divide(self, specs: Sequence[Spec]) -> Iterator[tuple[Cut, list[Spec], list[Window]]]:
        """Yields parameters that are sent together, and which rows of the givers' chunks: large ones go in several.

        They are cut alike: so their pieces have the same size on all givers.
        """
        # Where takers pass weights on, they have them in memory that is received, and in memory that is sent.
        limit = _BUCKET // (2 if all(c.direct for c in self.zone.columns if c) else 4)
        limit = max(1, limit * min(8, max(1, len(self.zone.givers) // 128)))  # of many givers nobody sends crumbs
        alike: dict[Cut, list[Spec]] = {}
        for spec in specs:
            if prod(spec.shape):
                alike.setdefault(Cut.of(spec, self.target), []).append(spec)
        for cut, group in alike.items():
            chunk, bucket, size = self.cuts.chunk(cut), list[Spec](), 0
            copies = self.cuts.target_tp if cut.replicated and not cut.block else 1
            for spec in group:
                whole = prod(spec.shape) * self.dtype.itemsize * copies
                if bucket and size + whole > limit:
                    yield cut, bucket, [(0, chunk)]
                    bucket, size = [], 0
                if whole > limit:
                    rows = -(-chunk // -(-whole // limit))
                    yield cut, [spec], [(row, min(row + rows, chunk)) for row in range(0, chunk, rows)]
                else:
                    bucket.append(spec)
                    size += whole
            if bucket:
                yield cut, bucket, [(0, chunk)]

    def _buckets(self, specs: Sequence[Spec]) -> Iterator[_Bucket]:
        turns = cycle(range(self.cuts.source_tp))  # replicas of the source take turns, bucket by bucket
        for cut, together, windows in self._divide(specs):
            offsets = [self.cuts.row_offsets(together, t) for t in range(len(self.zone.columns))]
            for window, turn in zip(windows, turns, strict=False):
                gifts, share = [], None
                for t, given, way in self._columns_of(cut, turn):
                    segment = Segment(together, self.cuts, t, window, offsets[t])
                    if given and given.takers:
                        gifts.append((segment, given))
                    if way is not None:
                        share = _Share(segment, given.part if given and given.kept else None, way)
                yield _Bucket(together, gifts, share)

    def _columns(self, cut: Cut, turn: int) -> list[tuple[int, _Given | None, _Direct | _Relay | None]]:
        """Returns the columns that this rank gives to or is in: what it gives, and how pieces come to it."""
        found: list[tuple[int, _Given | None, _Direct | _Relay | None]] = []
        for t, column in enumerate(self.zone.columns):
            parts = self.cuts.parts(cut, t, turn) if column else ()
            given = self._given(t, parts) if parts else None
            if given or (parts and t == self.zone.column):
                found.append((t, given, self._way_of(parts) if t == self.zone.column else None))
        return found

    def _given(self, t: int, parts: Parts) -> _Given | None:
        """Returns what this rank gives to a column: to all of its takers, or to the entry."""
        column, place = self.zone.columns[t], self.zone.place
        active = self.cuts.active(parts)
        if column is None or place is None or not active[place]:
            return None
        part = next(p for p in parts if p.tp_index == place % self.cuts.source_tp)
        if column.direct:
            takers, senders = column.takers.tolist(), [self.rank]
        else:
            takers, senders = [column.entry_of(place)], column.senders(int(column.entries[place]), active)
        return _Given(part, [r for r in takers if r != self.rank], senders, self.rank in takers)

    def _way(self, parts: Parts) -> _Direct | _Relay:
        """Returns how pieces come to this rank, a taker."""
        active, column = self.cuts.active(parts), self.zone.own_column
        if not column.direct:
            host, slot = column.place_of(self.rank)
            senders = column.senders(host * column.lanes + slot, active) if slot < column.lanes else []
            return _Relay(parts, senders, column.route(self.rank, active))
        by_index, tp = {part.tp_index: part for part in parts}, self.cuts.source_tp
        givers = {int(self.zone.givers[i]): (by_index[i % tp], i // tp) for i in np.flatnonzero(active).tolist()}
        return {rank: piece for rank, piece in givers.items() if rank != self.rank}

    def _arrivals(self, parts: Parts, device: torch.device) -> list[Arrival]:
        way = self._way_of(parts)
        assert isinstance(way, _Relay)
        return [self.cuts.arrival(part, way.route.position, device) for part in parts]

    def _move(
        self, bucket: _Bucket, held: Mapping[str, Tensor], filled: Mapping[str, Tensor], memory: Tensor
    ) -> Iterator[SendReceive]:
        share, take, receive = bucket.share, None, dict[int, Range]()
        device = next(iter((held or filled).values())).device
        data = memory[: share.size * self.dtype.itemsize] if share else torch.empty(0, dtype=torch.uint8, device=device)
        if share:
            receive = self._expect(share)
            if isinstance(share.way, Mapping):
                take = partial(self._take, share.segment, share.way, filled)
                if share.kept:
                    share.segment.keep(share.kept, self._shard, held, filled)
            elif share.kept:
                self._pack(share.segment, share.kept, held, data[: self._bytes(share.segment)])
        size, send, writes = 0, dict[int, Range](), list[tuple[int, int, Write]]()
        for segment, given in bucket.gifts:
            unit, place = self._bytes(segment), given.senders.index(self.rank)
            write = partial(self._pack, segment, given.part, held)
            collected = yield from collect(given.senders, place, unit, write, device)
            if collected:
                end = size + collected[0] * unit
                send |= dict.fromkeys(given.takers, (size, end))
                writes.append((size, end, collected[1]))
                size = end
        if send or receive:
            yield SendReceive(size, partial(_write_all, writes), send, data, receive, take)
        if share and isinstance(share.way, _Relay):
            yield from self._spread(share.segment, share.way.route, data)
            segments = data.view(self.dtype).view(share.way.route.total, -1)
            share.segment.unpack(self._arrivals_on(share.way.parts, device), segments, filled)

    def _expect(self, share: _Share) -> dict[int, Range]:
        """Returns who sends which bytes to this rank."""
        unit = self._bytes(share.segment)
        if isinstance(share.way, _Relay):
            senders, first = list(share.way.senders), int(share.kept is not None)
            width = pieces_per_message(len(senders))
        else:
            senders, first, width = list(share.way), 0, 1
        ends = [first + k for k in (*range(0, len(senders), width), len(senders))]
        return {s: (a * unit, b * unit) for s, a, b in zip(senders[::width], ends, ends[1:], strict=False)}

    def _take(self, segment: Segment, way: _Direct, filled: Mapping[str, Tensor], giver: int, memory: Tensor) -> None:
        segment.take(*way[giver], memory.view(self.dtype), filled)

    def _spread(self, segment: Segment, route: Route, data: Tensor) -> Iterator[SendReceive]:
        """Gathers the pieces that other takers of this column have, first from other hosts, then within the host."""
        column, unit = self.zone.own_column, self._bytes(segment)
        host, slot = column.place_of(self.rank)
        if slot < column.lanes:
            yield from all_gather_pieces(column.lane_ranks(slot), host, route.lane, unit, data, _HOST_RADIX)
        yield from all_gather_pieces(column.host_ranks(host), slot, route.host, unit, data, _LOCAL_RADIX)

    @property
    def _shard(self) -> int:
        assert self.zone.place is not None
        return self.zone.place // self.cuts.source_tp

    def _bytes(self, segment: Segment) -> int:
        return segment.size * self.dtype.itemsize

    def _pack(self, segment: Segment, part: Part, held: Mapping[str, Tensor], out: Tensor) -> None:
        segment.pack(part, self._shard, held, out.view(self.dtype))


def _write_all(writes: Sequence[tuple[int, int, Write]], out: Tensor) -> None:
    for begin, end, write in writes:
        write(out[begin:end])
