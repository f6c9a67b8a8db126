"""Who receives weights from whom in a weight sync. Pure, and the same on every rank that derives it.

A *zone* is one replica of the source's shards with the takers that it serves. A *column* is the takers of a zone that
want the same part of every parameter: those with one tensor-parallel index. Each giver sends what a column wants to one
of its takers, its *entry*. The takers then gather the rest from each other: first between hosts, among those with the
same slot on their host (a *lane*), so that one copy of the data comes to a host; then within the host. Where all are on
one host, or there is one taker, givers send to all takers directly.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distflow.plan.layout import Layout
from distflow.plan.topology import Topology
from distflow.weights.shards import Shards

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
FAN_IN = 16  # ranks that one rank receives from at once, at most


@dataclass(frozen=True)
class Route:
    """How the pieces of some givers come to one taker. Counts are of pieces; `position` is that in its memory."""

    position: Ints  # by the giver's place; −1: none
    own: int  # pieces that enter here, the first ones
    lane: list[int]  # that enter at each host, from this one on
    host: list[int]  # that each rank of this host has, from this one on, when the lanes are done

    @property
    def total(self) -> int:
        return sum(self.host)


@dataclass(frozen=True)
class Column:
    """The takers of one column, by host, and the entry of each giver: host * lanes + slot."""

    givers: Ints
    takers: Ints
    starts: Ints  # where the takers of each host begin
    lanes: int  # every host has at least as many takers; only these are entries
    entries: Ints  # by the giver's place
    direct: bool  # all takers receive from all givers, and pass nothing on

    @classmethod
    def of(cls, givers: Ints, takers: Ints, hosts: Ints) -> "Column":
        """Chooses the entry of each giver: itself, else a taker on its host, else any; evenly."""
        takers = takers[np.argsort(hosts[takers], kind="stable")]
        numbers, starts = np.unique(hosts[takers], return_index=True)
        lanes = int(np.diff(starts, append=len(takers)).min())
        host, slot = np.searchsorted(numbers, hosts[takers]), _ordinals(hosts[takers])
        at = np.full(len(hosts), -1)
        at[takers] = np.where(slot < lanes, host * lanes + slot, -1)
        entries = at[givers]
        host = np.minimum(np.searchsorted(numbers, hosts[givers]), len(numbers) - 1)
        near = (numbers[host] == hosts[givers]) & (entries < 0)
        entries[near] = host[near] * lanes + _ordinals(host[near]) % lanes
        far = np.flatnonzero(entries < 0)
        k, n = np.arange(len(far)), len(numbers)
        few = len(far) < n * lanes
        entries[far] = (k * n // max(1, len(far))) * lanes + k % lanes if few else k % (n * lanes)
        # Takers of one host read the same memory, where givers pack once for all of them.
        together = len(takers) == 1 or (len(numbers) == 1 and bool((hosts[givers] == numbers[0]).all()))
        return cls(givers, takers, starts, lanes, entries, together and max(len(givers), len(takers)) <= FAN_IN)

    @cached_property
    def own(self) -> Mask:
        """Whether each giver is its own entry."""
        mask: Mask = self.takers[self.starts[self.entries // self.lanes] + self.entries % self.lanes] == self.givers
        return mask

    def entry_of(self, giver: int) -> int:
        """Returns the rank to which the giver of this place sends."""
        host, slot = divmod(int(self.entries[giver]), self.lanes)
        return int(self.takers[self.starts[host] + slot])

    def senders(self, entry: int, active: Mask) -> list[int]:
        """Returns the active givers that send to an entry, which itself is none of them."""
        ranks: list[int] = self.givers[active & (self.entries == entry) & ~self.own].tolist()
        return ranks

    def place_of(self, taker: int) -> tuple[int, int]:
        """Returns the host of a taker, among those of the column, and its slot there."""
        place = int(np.flatnonzero(self.takers == taker)[0])
        host = int(np.searchsorted(self.starts, place, side="right")) - 1
        return host, place - int(self.starts[host])

    def host_ranks(self, host: int) -> list[int]:
        end = self.starts[host + 1] if host + 1 < len(self.starts) else None
        ranks: list[int] = self.takers[self.starts[host] : end].tolist()
        return ranks

    def lane_ranks(self, slot: int) -> list[int]:
        ranks: list[int] = self.takers[self.starts + slot].tolist()
        return ranks

    def route(self, taker: int, active: Mask) -> Route:
        """Returns how the pieces of the `active` givers come to a taker."""
        host, slot = self.place_of(taker)
        hosts, local = len(self.starts), len(self.host_ranks(host))
        entries = self.entries[active]
        counts = np.bincount(entries, minlength=hosts * self.lanes).reshape(hosts, self.lanes)
        per_slot = np.zeros(local, np.int64)
        per_slot[: self.lanes] = counts.sum(0)
        lane = np.roll(counts[:, slot], -host).tolist() if slot < self.lanes else [0] * hosts
        # Everybody's memory begins with its own pieces; the ranks and hosts after it follow, in a circle.
        keys = ~self.own[active], (entries // self.lanes - host) % hosts, (entries % self.lanes - slot) % local
        position = np.full(len(self.givers), -1)
        position[np.flatnonzero(active)[np.lexsort(keys)]] = np.arange(len(entries))
        return Route(position, lane[0], lane, np.roll(per_slot, -slot).tolist())


@dataclass(frozen=True)
class Zone:
    """The givers of one replica and the columns that they serve (None: no taker); `column` is that of this rank."""

    givers: Ints
    place: int | None  # of this rank among the givers
    columns: list[Column | None]
    column: int | None

    @property
    def own_column(self) -> Column:
        column = None if self.column is None else self.columns[self.column]
        assert column is not None
        return column

    @classmethod
    def of(cls, rank: int, source: Shards, target: Layout, topology: Topology) -> "Zone":
        """Returns the zone that a rank belongs to."""
        hosts, takers = np.array(topology.hosts), np.array(target.ranks)
        zones, size = zones_of_takers(source, target, hosts), source.shard * source.layout.tp
        replica = source.layout.replica_of(rank)
        at = target.ranks.index(rank) if target.replica_of(rank) is not None else None
        if replica is not None:
            zone = replica // source.shard
        else:
            assert at is not None, f"rank {rank} has no part in this weight sync"
            zone = int(zones[at])
        givers = np.array(source.layout.ranks[zone * size : (zone + 1) * size])
        served = [takers[t :: target.tp][zones[t :: target.tp] == zone] for t in range(target.tp)]
        columns = [Column.of(givers, column, hosts) if len(column) else None for column in served]
        place = None if replica is None else int(np.flatnonzero(givers == rank)[0])
        return cls(givers, place, columns, None if at is None else at % target.tp)


def zones_of_takers(source: Shards, target: Layout, hosts: Ints) -> Ints:
    """Returns which replica of the source serves each rank of the target.

    Its own if it is in one, else one on its host; the takers of a host without any share one, so that one copy crosses.
    """
    givers, takers = np.array(source.layout.ranks), np.array(target.ranks)
    if source.replicas == 1:
        return np.zeros(len(takers), np.int64)
    replica = np.full(len(hosts), -1)
    replica[givers] = np.arange(len(givers)) // (source.shard * source.layout.tp)
    zones: Ints = replica[takers]
    others = np.flatnonzero(zones < 0)
    host = hosts[takers[others]]
    by_host = givers[np.argsort(hosts[givers], kind="stable")]
    first, end = (np.searchsorted(hosts[by_host], host, side=side) for side in ("left", "right"))
    near = end > first
    zones[others[near]] = replica[by_host[first[near] + _ordinals(host[near]) % (end - first)[near]]]
    if len(far := others[~near]):
        names, number = np.unique(hosts[takers[far]], return_inverse=True)
        zones[far] = number * source.replicas // len(names)
    return zones


def _ordinals(keys: Ints) -> Ints:
    """Returns, for each key, how many equal ones come before it."""
    order = np.argsort(keys, kind="stable")
    ordinals = np.empty(len(keys), np.int64)
    ordinals[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return ordinals
