"""The weight hand-over from one layout to another, peer to peer, in a number of messages that grows as log N.

Everybody derives from specs and layouts alone, once, what it sends and what it receives: nothing is negotiated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch
from torch import Tensor

from distflow.data.collectives import SendReceive
from distflow.engine.columns import Route, Zone
from distflow.engine.pieces import Arrival, Cut, Cuts, Part, Segment
from distflow.engine.relay import Write, collect, gather, pieces_per_message
from distflow.engine.weights import Shards, Spec
from distflow.plan.topology import Topology

_BUCKET = 1 << 24  # bytes of parameters, in float32, that are sent together: they stay in a cache
_HOST_RADIX, _LOCAL_RADIX = 2, 8  # ranks of a host all read the same memory; a link carries a copy for each

Parts = tuple[Part, ...]


@dataclass(frozen=True)
class _Gift:
    """A piece of every parameter of a bucket for one column, sent to its entry, as all `senders` do."""

    segment: Segment
    part: Part
    entry: int
    senders: Sequence[int]


@dataclass(frozen=True)
class _Share:
    """What a taker gets: pieces of all `parts`, those of `kept` from itself and some from `senders`, as their entry."""

    segment: Segment
    parts: Parts
    kept: Part | None
    senders: Sequence[int]
    route: Route

    @property
    def alone(self) -> bool:
        """Whether nobody else gives this rank anything, or takes anything from it."""
        return self.kept is not None and self.route.total == len(self.route.lane) == len(self.route.host) == 1


@dataclass(frozen=True)
class _Bucket:
    specs: Sequence[Spec]
    gifts: Sequence[_Gift]
    share: _Share | None


class HandOver:
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
        limit = _BUCKET * min(8, max(1, len(self.zone.givers) // 128))  # of many givers nobody sends crumbs
        self._parts, self._given_of = cache(self.cuts.parts), cache(self._given)
        self._routed_of, self._arrivals_on = cache(self._routed), cache(self._arrivals)
        self.buckets = [self._bucket(i, bucket) for i, bucket in enumerate(_divide(specs, target, limit))]

    def run(self, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> Iterator[SendReceive]:
        """Fills `filled`, this rank's parameters in the target layout, from everybody's `held` in the source layout.

        A tensor of `held` is looked up when its bucket is sent, and once: it may be computed then.
        """
        for bucket in self.buckets:
            kept = bucket.share is not None and bucket.share.kept is not None
            parts = {spec.name: held[spec.name] for spec in bucket.specs} if kept or bucket.gifts else {}
            if parts or bucket.share:
                yield from self._move(bucket, parts, filled)

    def _bucket(self, number: int, specs: Sequence[Spec]) -> _Bucket:
        gifts, share, cut = [], None, Cut.of(specs[0], self.target)
        for t, column in enumerate(self.zone.columns):
            if column is None:
                continue
            parts = self._parts(cut, t, number % self.cuts.source_tp)
            if not parts:
                continue
            given = self._given_of(t, parts)
            if given is None and t != self.zone.column:
                continue
            segment = Segment.of(specs, self.cuts, t, parts[0].chunk)
            kept = None
            if given is not None:
                part, entry, senders = given
                if entry == self.rank:
                    kept = part
                else:
                    gifts.append(_Gift(segment, part, entry, senders))
            if t == self.zone.column:
                share = _Share(segment, parts, kept, *self._routed_of(parts))
        return _Bucket(specs, gifts, share)

    def _given(self, t: int, parts: Parts) -> tuple[Part, int, list[int]] | None:
        """Returns the part of which this rank gives a piece to a column, the entry, and all who send to that."""
        column, place = self.zone.columns[t], self.zone.place
        active = self.cuts.active(parts)
        if column is None or place is None or not active[place]:
            return None
        part = next(p for p in parts if p.tp_index == place % self.cuts.source_tp)
        return part, column.entry_of(place), column.senders(int(column.entries[place]), active)

    def _routed(self, parts: Parts) -> tuple[list[int], Route]:
        """Returns who sends to this rank, a taker, and how the rest comes to it."""
        active, column = self.cuts.active(parts), self.zone.own_column
        host, slot = column.place_of(self.rank)
        senders = column.senders(host * column.lanes + slot, active) if slot < column.lanes else []
        return senders, column.route(self.rank, active)

    def _arrivals(self, parts: Parts, device: torch.device) -> list[Arrival]:
        _, route = self._routed_of(parts)
        return [self.cuts.arrival(part, route.position, device) for part in parts]

    def _move(self, bucket: _Bucket, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> Iterator[SendReceive]:
        device = next(iter((held or filled).values())).device
        share = bucket.share
        if share and share.kept and share.alone:
            share.segment.keep(share.kept, self._shard, held, filled)
            share = None
        data = torch.empty(
            self._bytes(share.segment) * share.route.total if share else 0, dtype=torch.uint8, device=device
        )
        receive = {}
        if share:
            n, unit, first = len(share.senders), self._bytes(share.segment), int(share.kept is not None)
            width = pieces_per_message(n)
            for k in range(0, n, width):
                receive[share.senders[k]] = (first + k) * unit, (first + min(k + width, n)) * unit
            if share.kept:
                self._pack(share.segment, share.kept, held, data[:unit])
        send, writes, at = {}, [], 0
        for gift in bucket.gifts:
            unit, place = self._bytes(gift.segment), gift.senders.index(self.rank)
            write = partial(self._pack, gift.segment, gift.part, held)
            collected = yield from collect(gift.senders, place, unit, write, device)
            if collected:
                end = at + collected[0] * unit
                send[gift.entry] = at, end
                writes.append((at, end, collected[1]))
                at = end
        if send or receive:
            yield SendReceive(at, partial(_write_all, writes), send, data, receive)
        if share:
            yield from self._spread(share, data)
            segments = data.view(self.dtype).view(share.route.total, -1)
            share.segment.unpack(self._arrivals_on(share.parts, device), segments, filled)

    def _spread(self, share: _Share, data: Tensor) -> Iterator[SendReceive]:
        """Gathers the pieces that other takers of this column have, first from other hosts, then within the host."""
        column, unit = self.zone.own_column, self._bytes(share.segment)
        host, slot = column.place_of(self.rank)
        if slot < column.lanes:
            yield from gather(column.lane_ranks(slot), host, share.route.lane, unit, data, _HOST_RADIX)
        yield from gather(column.host_ranks(host), slot, share.route.host, unit, data, _LOCAL_RADIX)

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


def _divide(specs: Sequence[Spec], target: Shards, limit: int) -> Iterator[list[Spec]]:
    """Yields parameters that are cut alike and sent together: so their pieces have the same size on all givers."""
    alike: dict[Cut, list[Spec]] = {}
    for spec in specs:
        if prod(spec.shape):
            alike.setdefault(Cut.of(spec, target), []).append(spec)
    for group in alike.values():
        bucket, size = [], 0
        for spec in group:
            bucket.append(spec)
            size += 4 * prod(spec.shape)
            if size >= limit:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
