"""The groups and routes of a weight sync. Pure, and the same on every rank that derives them.

A *sync group* is the source ranks of one full copy of the parameters, with the destination ranks that it serves. A *dp
group* is the destination ranks of a sync group with one tensor-parallel rank: they want the same part of every
parameter. Each source rank sends its piece to one rank of the dp group, its *relay*. The dp group then all-gathers the
pieces: first between hosts, among ranks with the same local rank (a *rail*), so that one copy of the data comes to a
host; then within the host. On one host, or with one destination rank, source ranks send to all of the dp group.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distflow.plan.layout import Layout
from distflow.plan.topology import Topology
from distflow.util.arrays import Ints
from distflow.weights.shards import Shards

Mask = NDArray[np.bool_]
FAN_IN = 16  # ranks that one rank receives from at once, at most


@dataclass(frozen=True)
class GatherOrder:
    """The order of the pieces in the buffer of one destination rank, and how many each stage of the gather brings."""

    position: Ints  # in the buffer, by source index; −1: no piece
    relayed: int  # pieces for which this rank is the relay; they come first
    rail: list[int]  # pieces relayed at each host of the rail, from this host on
    host: list[int]  # pieces that each rank of this host has after the rails, from this rank on

    @property
    def total(self) -> int:
        return sum(self.host)


@dataclass(frozen=True)
class DpGroup:
    """Destination ranks of one tensor-parallel rank, sorted by host, and the relay of each source rank."""

    sources: Ints
    ranks: Ints
    starts: Ints  # where the ranks of each host begin
    rails: int  # every host has at least as many ranks; only local ranks below this are relays
    relays: Ints  # by source index: host * rails + local rank
    direct: bool  # all ranks receive from all source ranks, without a gather

    @classmethod
    def of(cls, sources: Ints, ranks: Ints, hosts: Ints) -> "DpGroup":
        """Chooses the relay of each source rank: itself, else a rank on its host, else any; evenly."""
        ranks = ranks[np.argsort(hosts[ranks], kind="stable")]
        numbers, starts = np.unique(hosts[ranks], return_index=True)
        rails = int(np.diff(starts, append=len(ranks)).min())
        host, local = np.searchsorted(numbers, hosts[ranks]), _ordinals(hosts[ranks])
        relay_at = np.full(len(hosts), -1)
        relay_at[ranks] = np.where(local < rails, host * rails + local, -1)
        relays = relay_at[sources]
        host = np.minimum(np.searchsorted(numbers, hosts[sources]), len(numbers) - 1)
        near = (numbers[host] == hosts[sources]) & (relays < 0)
        relays[near] = host[near] * rails + _ordinals(host[near]) % rails
        far = np.flatnonzero(relays < 0)
        k, n = np.arange(len(far)), len(numbers)
        few = len(far) < n * rails
        relays[far] = (k * n // max(1, len(far))) * rails + k % rails if few else k % (n * rails)
        # Destination ranks of one host read the same memory, where source ranks pack once for all of them.
        together = len(ranks) == 1 or (len(numbers) == 1 and bool((hosts[sources] == numbers[0]).all()))
        return cls(sources, ranks, starts, rails, relays, together and max(len(sources), len(ranks)) <= FAN_IN)

    @cached_property
    def own(self) -> Mask:
        """Returns whether each source rank is its own relay."""
        mask: Mask = self.ranks[self.starts[self.relays // self.rails] + self.relays % self.rails] == self.sources
        return mask

    def relay_of(self, source: int) -> int:
        """Returns the rank to which the source rank of this index sends."""
        host, local = divmod(int(self.relays[source]), self.rails)
        return int(self.ranks[self.starts[host] + local])

    def senders(self, relay: int, active: Mask) -> list[int]:
        """Returns the active source ranks that send to a relay, without the relay itself."""
        ranks: list[int] = self.sources[active & (self.relays == relay) & ~self.own].tolist()
        return ranks

    def host_and_local_rank(self, rank: int) -> tuple[int, int]:
        """Returns the index of a rank's host in this group, and the rank's place on that host."""
        index = int(np.flatnonzero(self.ranks == rank)[0])
        host = int(np.searchsorted(self.starts, index, side="right")) - 1
        return host, index - int(self.starts[host])

    def host_ranks(self, host: int) -> list[int]:
        end = self.starts[host + 1] if host + 1 < len(self.starts) else None
        ranks: list[int] = self.ranks[self.starts[host] : end].tolist()
        return ranks

    def rail_ranks(self, local: int) -> list[int]:
        ranks: list[int] = self.ranks[self.starts + local].tolist()
        return ranks

    def gather_order(self, rank: int, active: Mask) -> GatherOrder:
        """Returns how the pieces of the `active` source ranks come to a rank of this group."""
        host, local = self.host_and_local_rank(rank)
        hosts, local_size = len(self.starts), len(self.host_ranks(host))
        relays = self.relays[active]
        counts = np.bincount(relays, minlength=hosts * self.rails).reshape(hosts, self.rails)
        per_local = np.zeros(local_size, np.int64)
        per_local[: self.rails] = counts.sum(0)
        rail = np.roll(counts[:, local], -host).tolist() if local < self.rails else [0] * hosts
        # Every buffer begins with the rank's own pieces; the ranks and hosts after it follow, in a circle.
        keys = ~self.own[active], (relays // self.rails - host) % hosts, (relays % self.rails - local) % local_size
        position = np.full(len(self.sources), -1)
        position[np.flatnonzero(active)[np.lexsort(keys)]] = np.arange(len(relays))
        return GatherOrder(position, rail[0], rail, np.roll(per_local, -local).tolist())


@dataclass(frozen=True)
class SyncGroup:
    """The source ranks of one copy of the parameters, and the destination ranks that it serves."""

    sources: Ints
    source_index: int | None  # of this rank, if it is a source rank
    dp_groups: list[DpGroup | None]  # by the destination's tensor-parallel rank; None: this copy serves none
    tp_rank: int | None  # of this rank, if it is a destination rank

    @property
    def own_dp_group(self) -> DpGroup:
        group = None if self.tp_rank is None else self.dp_groups[self.tp_rank]
        assert group is not None
        return group

    @classmethod
    def of(cls, rank: int, source: Shards, destination: Layout, topology: Topology) -> "SyncGroup":
        """Returns the sync group that a rank belongs to."""
        hosts, ranks = np.array(topology.hosts), np.array(destination.ranks)
        serving, size = serving_copies(source, destination, hosts), source.shard * source.layout.tp
        replica = source.layout.replica_of(rank)
        index = destination.ranks.index(rank) if destination.replica_of(rank) is not None else None
        if replica is not None:
            server = replica // source.shard
        else:
            assert index is not None, f"rank {rank} has no part in this weight sync"
            server = int(serving[index])
        tp = destination.tp
        sources = np.array(source.layout.ranks[server * size : (server + 1) * size])
        served = [ranks[t::tp][serving[t::tp] == server] for t in range(tp)]
        dp_groups = [DpGroup.of(sources, group, hosts) if len(group) else None for group in served]
        source_index = None if replica is None else int(np.flatnonzero(sources == rank)[0])
        return cls(sources, source_index, dp_groups, None if index is None else index % tp)


def serving_copies(source: Shards, destination: Layout, hosts: Ints) -> Ints:
    """Returns the index of the source's copy of the parameters that serves each destination rank.

    This is the copy that the rank has a part of, else one on its host. Ranks of a host without any share one copy, so
    that the weights come to a host once.
    """
    sources, ranks = np.array(source.layout.ranks), np.array(destination.ranks)
    if source.copies == 1:
        return np.zeros(len(ranks), np.int64)
    copy = np.full(len(hosts), -1)
    copy[sources] = np.arange(len(sources)) // (source.shard * source.layout.tp)
    serving: Ints = copy[ranks]
    others = np.flatnonzero(serving < 0)
    host = hosts[ranks[others]]
    by_host = sources[np.argsort(hosts[sources], kind="stable")]
    first, end = (np.searchsorted(hosts[by_host], host, side=side) for side in ("left", "right"))
    near = end > first
    serving[others[near]] = copy[by_host[first[near] + _ordinals(host[near]) % (end - first)[near]]]
    if len(far := others[~near]):
        names, number = np.unique(hosts[ranks[far]], return_inverse=True)
        serving[far] = number * source.copies // len(names)
    return serving


def _ordinals(keys: Ints) -> Ints:
    """Returns, for each key, how many equal ones come before it."""
    order = np.argsort(keys, kind="stable")
    ordinals = np.empty(len(keys), np.int64)
    ordinals[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return ordinals
