"""The weight hand-over, in the phases of `engine/columns.py`: givers to entries, entries between hosts, within a host.

A *column* is the ranks that want the same part of the weights. One copy of it crosses to each of their hosts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distflow.data.balance import Ints
from distflow.plan.layout import Layout
from distflow.simulate.models import Floats
from distflow.simulate.network import Network

BUCKET = 1 << 28  # bytes of float32 parameters that are handed over together, on average
Flows = tuple[Ints, Ints, Floats]


def hand_over(
    network: Network, source: Layout, target: Layout, shards: int, weights: float, params: float, start: Floats
) -> tuple[Floats, float]:
    """Returns when each rank has its weights, and the bytes that were sent.

    `weights` bytes are cut over `shards` dp ranks and the tp ranks of the source, and replicated beyond.
    """
    if weights <= 0 or (source == target and shards == 1):
        return start, 0.0
    columns = list(_columns(source, target, shards, weights, network.hosts))
    buckets = max(1, math.ceil(4 * params / BUCKET))
    sent = 0.0
    now = start
    for i, flows in enumerate(_phases(columns)):
        sender, receiver, size = (np.concatenate(parts) for parts in zip(*flows, strict=True))
        now = network.exchange(sender, receiver, size, now, buckets, pack=i == 0)
        sent += float(size.sum())
    return now, sent


@dataclass(frozen=True)
class _Column:
    """The takers of a column, [hosts, slots] (padded with −1), the entry of each giver, and the bytes of its piece."""

    givers: Ints
    entries: Ints  # ranks
    takers: Ints
    lanes: int  # every host has at least as many takers, and only those are entries
    piece: float

    def to_entries(self) -> Flows:
        other = self.entries != self.givers
        return self.givers[other], self.entries[other], np.full(int(other.sum()), self.piece)

    def between_hosts(self, distance: int) -> Flows:
        """A round of Bruck's all-gather among the takers with the same slot: everybody passes on what it has."""
        hosts = len(self.takers)
        if distance >= hosts:
            return _NOTHING
        ranks = self.takers[:, : self.lanes]
        held = len(self.givers) / hosts / self.lanes * min(distance, hosts - distance)
        return ranks.ravel(), np.roll(ranks, distance, axis=0).ravel(), np.full(ranks.size, self.piece * held)

    def within_host(self, distance: int) -> Flows:
        count = (self.takers >= 0).sum(axis=1)
        rows = np.flatnonzero(count > distance)
        if not len(rows):
            return _NOTHING
        slots = np.arange(self.takers.shape[1])
        row, slot = (x.ravel() for x in np.meshgrid(rows, slots, indexing="ij"))
        inside = slot < count[row]
        row, slot = row[inside], slot[inside]
        blocks = np.minimum(distance, count[row] - distance)
        size = self.piece * len(self.givers) / count[row] * blocks
        return self.takers[row, slot], self.takers[row, (slot - distance) % count[row]], size


_NOTHING: Flows = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def _phases(columns: list[_Column]) -> Iterator[list[Flows]]:
    """Yields what all columns send at the same time: to the entries, then round by round."""
    yield [c.to_entries() for c in columns]
    for axis, step in ((0, _Column.between_hosts), (1, _Column.within_host)):
        widest = max(c.takers.shape[axis] for c in columns)
        for k in range(math.ceil(math.log2(widest)) if widest > 1 else 0):
            yield [step(c, 1 << k) for c in columns]


def _columns(source: Layout, target: Layout, shards: int, weights: float, hosts: Ints) -> Iterator[_Column]:
    """Yields the columns that each replica of the source serves: its own ranks, those on its hosts, or a share."""
    givers, takers = np.asarray(source.ranks, np.int64), np.asarray(target.ranks, np.int64)
    parts = shards * source.tp
    replicas = len(givers) // parts
    replica = np.full(len(hosts), -1, np.int64)
    replica[givers] = np.arange(len(givers)) // parts
    zones = replica[takers]
    on_host = np.full(int(hosts.max()) + 1, -1, np.int64)
    on_host[hosts[givers]] = replica[givers]
    zones = np.where(zones < 0, on_host[hosts[takers]], zones)
    names, number = np.unique(hosts[takers], return_inverse=True)
    zones = np.where(zones < 0, number * replicas // len(names), zones)
    piece = weights / target.tp / parts
    for zone in range(replicas):
        own = givers[zone * parts : (zone + 1) * parts]
        for t in range(target.tp):
            column = takers[t :: target.tp][zones[t :: target.tp] == zone]
            if len(column):
                yield _column(own, column, hosts, piece)


def _column(givers: Ints, column: Ints, hosts: Ints, piece: float) -> _Column:
    """Chooses the entry of each giver: itself, else a taker on its host, else any; evenly."""
    column = column[np.argsort(hosts[column], kind="stable")]
    names, first, count = np.unique(hosts[column], return_index=True, return_counts=True)
    table = np.full((len(names), int(count.max())), -1, np.int64)
    slot = np.arange(len(column)) - np.repeat(first, count)
    host = np.repeat(np.arange(len(names)), count)
    table[host, slot] = column
    lanes = int(count.min())
    own = np.isin(givers, column[slot < lanes])
    at = np.minimum(np.searchsorted(names, hosts[givers]), len(names) - 1)
    near = ~own & (names[at] == hosts[givers])
    entries = givers.copy()
    entries[near] = table[at[near], np.arange(int(near.sum())) % lanes]
    far = np.flatnonzero(~own & ~near)
    entries[far] = table[np.arange(len(far)) % len(names), np.arange(len(far)) // len(names) % lanes]
    return _Column(givers, entries, table, lanes, piece)
