"""The weight sync, in the phases of `weights/sync.py`: givers to entries, between hosts, within a host.

A *column* is the ranks that want the same part of the weights. One copy of it crosses to each of their hosts. On one
host, givers send to all of them directly.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distflow.config.model_shape import Floats
from distflow.plan.layout import Layout
from distflow.simulate.network import Network
from distflow.util.arrays import Ints
from distflow.weights.columns import Column, zones_of_takers
from distflow.weights.shards import Shards

BUCKET = 1 << 23  # bytes that are synced together; more if there are many givers
ALONG = 0.7  # of the weights are cut by tensor parallelism along the rows that FSDP cuts, the others across
_HOST_RADIX, _LOCAL_RADIX = 2, 8
Flows = tuple[Ints, Ints, Floats]


def sync_weights(
    network: Network,
    source: Layout,
    target: Layout,
    shards: int,
    weights: float,
    start: Floats,
    along: float = ALONG,
) -> tuple[Floats, float]:
    """Returns when each rank has its weights, and the bytes that were sent.

    `weights` bytes are cut over `shards` dp ranks and the tp ranks of the source, and replicated beyond.
    """
    sent, now = 0.0, start
    bucket = BUCKET * min(8, max(1, shards * source.tp // 128))
    for share, is_along in ((along, True), (1 - along, False)):
        if not weights * share:
            continue
        buckets = max(1, math.ceil(weights * share / bucket))
        columns = list(_columns(source, target, shards, weights * share, network.hosts, is_along))
        for i, flows in enumerate(_phases(columns)):
            sender, receiver, size = (np.concatenate(parts) for parts in zip(*flows, strict=True))
            some = size > 0
            now = network.exchange(sender[some], receiver[some], size[some], now, buckets, pack=i == 0)
            sent += float(size.sum())
    return now, sent


@dataclass(frozen=True)
class _Column:
    """The takers of a column, [hosts, slots] (padded with −1), and the bytes that each giver sends to its entry."""

    givers: Ints
    takers: Ints
    lanes: int  # every host has at least as many takers, and only those are entries
    entries: Ints  # by giver: host * lanes + slot
    pieces: Floats  # by giver
    direct: bool

    def to_entries(self) -> Flows:
        if self.direct:
            giver, taker = (grid.ravel() for grid in np.meshgrid(self.givers, self.takers[0], indexing="ij"))
            other = giver != taker
            return giver[other], taker[other], np.repeat(self.pieces, self.takers.size)[other]
        entry = self.takers[self.entries // self.lanes, self.entries % self.lanes]
        other = entry != self.givers
        return self.givers[other], entry[other], self.pieces[other]

    @property
    def entered(self) -> Floats:
        """Bytes that enter at each host and lane, [hosts, lanes]."""
        hosts = len(self.takers)
        entered = np.bincount(self.entries, self.pieces, hosts * self.lanes).astype(np.float64)
        return entered.reshape(hosts, self.lanes)

    def between_hosts(self, have: int, distance: int) -> Flows:
        """A round of Bruck's all-gather among the takers with the same slot: all pass on the blocks that they have."""
        hosts = len(self.takers)
        if distance >= hosts or self.direct:
            return _NOTHING
        ranks = self.takers[:, : self.lanes]
        size = _window(self.entered, min(have, hosts - distance))
        return ranks.ravel(), np.roll(ranks, distance, axis=0).ravel(), size.ravel()

    def within_host(self, have: int, distance: int) -> Flows:
        """The same among the takers of a host, each of which has what entered at its slot of any host."""
        if self.direct:
            return _NOTHING
        count = (self.takers >= 0).sum(axis=1)
        flows = []
        for n in np.unique(count[count > distance]).tolist():
            ranks = self.takers[count == n, :n]
            held = np.zeros(n)
            held[: self.lanes] = self.entered.sum(axis=0)
            size = np.broadcast_to(_window(held, min(have, n - distance)), ranks.shape)
            flows.append((ranks.ravel(), np.roll(ranks, distance, axis=1).ravel(), size.ravel()))
        sender, receiver, sizes = zip(*flows, strict=True) if flows else ([_NOTHING[0]], [_NOTHING[1]], [_NOTHING[2]])
        return np.concatenate(sender), np.concatenate(receiver), np.concatenate(sizes)


_NOTHING: Flows = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def _window(values: Floats, count: int) -> Floats:
    """Returns the sum of each row and the count − 1 after it, in a circle."""
    total = np.concatenate([values, values[:count]])
    ends = np.concatenate([np.zeros_like(total[:1]), np.cumsum(total, axis=0)])
    window: Floats = ends[count : count + len(values)] - ends[: len(values)]
    return window


def _phases(columns: list[_Column]) -> Iterator[list[Flows]]:
    """Yields what all columns send at the same time: to the entries, then round by round."""
    yield [c.to_entries() for c in columns]
    for axis, step, radix in ((0, _Column.between_hosts, _HOST_RADIX), (1, _Column.within_host, _LOCAL_RADIX)):
        widest, have = max(c.takers.shape[axis] for c in columns), 1
        while have < widest:
            yield [step(c, have, d) for c in columns for d in range(have, min(widest, radix * have), have)]
            have *= radix


def _columns(
    source: Layout, target: Layout, shards: int, weights: float, hosts: Ints, along: bool
) -> Iterator[_Column]:
    """Yields the columns that each replica of the source serves: its own ranks, those on its hosts, or a share."""
    givers, takers = np.asarray(source.ranks, np.int64), np.asarray(target.ranks, np.int64)
    parts = shards * source.tp
    zones = zones_of_takers(Shards(source, shards), target, hosts)
    for t in range(target.tp):
        pieces = weights * _overlaps(shards, source.tp, t, target.tp, along)
        for zone in range(len(givers) // parts):
            served = takers[t :: target.tp][zones[t :: target.tp] == zone]
            if len(served):
                column = Column.of(givers[zone * parts : (zone + 1) * parts], served, hosts)
                yield _Column(column.givers, _table(column), column.lanes, column.entries, pieces, column.direct)


def _overlaps(shards: int, source_tp: int, t: int, target_tp: int, along: bool) -> Floats:
    """Returns the share of the weights that each giver sends for column t; of rows, always a whole chunk."""
    place = np.arange(shards * source_tp)
    d, u = place // source_tp, place % source_tp
    want = t / target_tp, (t + 1) / target_tp
    if along:  # of its rows, tensor parallelism takes a slice and FSDP a chunk of that
        chunk = 1 / shards / source_tp
        low = u / source_tp + d * chunk
        shared = np.minimum(low + chunk, want[1]) - np.maximum(low, want[0])
        return np.where(shared > 1e-12, chunk, 0.0)
    both = np.maximum(np.minimum((u + 1) / source_tp, want[1]) - np.maximum(u / source_tp, want[0]), 0).round(12)
    overlaps: Floats = both / shards
    return overlaps


def _table(column: Column) -> Ints:
    """Returns the takers of a column, [hosts, slots], padded with −1."""
    count = np.diff(column.starts, append=len(column.takers))
    table = np.full((len(count), int(count.max())), -1, np.int64)
    table[np.arange(table.shape[1]) < count[:, None]] = column.takers
    return table
