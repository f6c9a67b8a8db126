"""The weight sync, in the phases of `weights/sync.py`: source ranks to relays, between hosts, within a host.

A *dp group* is the ranks that want the same part of the weights. One copy of it crosses to each of their hosts. On one
host, source ranks send to all of them directly.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distflow.config.model_shape import Floats
from distflow.plan.layout import Layout
from distflow.simulate.network import NetworkModel
from distflow.util.arrays import Ints
from distflow.weights.shards import Shards
from distflow.weights.sync_group import DpGroup, serving_copies

BUCKET = 1 << 23  # bytes that are synced together; more if there are many source ranks
ALONG = 0.7  # of the weights are cut by tensor parallelism along the rows that FSDP cuts, the others across
_HOST_RADIX, _LOCAL_RADIX = 2, 8
Flows = tuple[Ints, Ints, Floats]


def sync_weights(
    network: NetworkModel,
    source: Layout,
    destination: Layout,
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
    for fraction, is_along in ((along, True), (1 - along, False)):
        if not weights * fraction:
            continue
        buckets = max(1, math.ceil(weights * fraction / bucket))
        groups = list(_groups(source, destination, shards, weights * fraction, network.hosts, is_along))
        for i, flows in enumerate(_phases(groups)):
            sender, receiver, size = (np.concatenate(parts) for parts in zip(*flows, strict=True))
            some = size > 0
            now = network.exchange(sender[some], receiver[some], size[some], now, buckets, pack=i == 0)
            sent += float(size.sum())
    return now, sent


@dataclass(frozen=True)
class _Group:
    """A dp group, and the bytes that each source rank sends to its relay."""

    sources: Ints
    ranks: Ints  # [hosts, local ranks], padded with −1
    rails: int  # every host has at least as many ranks, and only those are relays
    relays: Ints  # by source index: host * rails + local rank
    pieces: Floats  # by source index
    direct: bool

    def to_relays(self) -> Flows:
        if self.direct:
            source, rank = (grid.ravel() for grid in np.meshgrid(self.sources, self.ranks[0], indexing="ij"))
            other = source != rank
            return source[other], rank[other], np.repeat(self.pieces, self.ranks.size)[other]
        relay = self.ranks[self.relays // self.rails, self.relays % self.rails]
        other = relay != self.sources
        return self.sources[other], relay[other], self.pieces[other]

    @property
    def relayed(self) -> Floats:
        """Bytes that come to the relays, [hosts, rails]."""
        hosts = len(self.ranks)
        relayed = np.bincount(self.relays, self.pieces, hosts * self.rails).astype(np.float64)
        return relayed.reshape(hosts, self.rails)

    def between_hosts(self, have: int, distance: int) -> Flows:
        """A round of Bruck's all-gather within the rails: every rank passes on the blocks that it has."""
        hosts = len(self.ranks)
        if distance >= hosts or self.direct:
            return _NOTHING
        ranks = self.ranks[:, : self.rails]
        size = _window(self.relayed, min(have, hosts - distance))
        return ranks.ravel(), np.roll(ranks, distance, axis=0).ravel(), size.ravel()

    def within_host(self, have: int, distance: int) -> Flows:
        """A round of the all-gather within each host, whose ranks have the blocks of their rails."""
        if self.direct:
            return _NOTHING
        count = (self.ranks >= 0).sum(axis=1)
        flows = []
        for n in np.unique(count[count > distance]).tolist():
            ranks = self.ranks[count == n, :n]
            held = np.zeros(n)
            held[: self.rails] = self.relayed.sum(axis=0)
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


def _phases(groups: list[_Group]) -> Iterator[list[Flows]]:
    """Yields what all dp groups send at the same time: to the relays, then round by round."""
    yield [g.to_relays() for g in groups]
    for axis, step, radix in ((0, _Group.between_hosts, _HOST_RADIX), (1, _Group.within_host, _LOCAL_RADIX)):
        widest, have = max(g.ranks.shape[axis] for g in groups), 1
        while have < widest:
            yield [step(g, have, d) for g in groups for d in range(have, min(widest, radix * have), have)]
            have *= radix


def _groups(
    source: Layout, destination: Layout, shards: int, weights: float, hosts: Ints, along: bool
) -> Iterator[_Group]:
    """Yields the dp groups of every sync group."""
    sources, ranks = np.asarray(source.ranks, np.int64), np.asarray(destination.ranks, np.int64)
    size, tp = shards * source.tp, destination.tp
    serving = serving_copies(Shards(source, shards), destination, hosts)
    for t in range(tp):
        pieces = weights * _overlaps(shards, source.tp, t, tp, along)
        for copy in range(len(sources) // size):
            served = ranks[t::tp][serving[t::tp] == copy]
            if len(served):
                group = DpGroup.of(sources[copy * size : (copy + 1) * size], served, hosts)
                yield _Group(group.sources, _by_host(group), group.rails, group.relays, pieces, group.direct)


def _overlaps(shards: int, source_tp: int, t: int, destination_tp: int, along: bool) -> Floats:
    """Returns the share of the weights that each source rank sends to tp rank t; of rows, always a whole chunk."""
    index = np.arange(shards * source_tp)
    d, u = index // source_tp, index % source_tp
    want = t / destination_tp, (t + 1) / destination_tp
    if along:  # tensor parallelism takes a slice of the rows, and FSDP a chunk of that
        chunk = 1 / shards / source_tp
        low = u / source_tp + d * chunk
        shared = np.minimum(low + chunk, want[1]) - np.maximum(low, want[0])
        return np.where(shared > 1e-12, chunk, 0.0)
    both = np.maximum(np.minimum((u + 1) / source_tp, want[1]) - np.maximum(u / source_tp, want[0]), 0).round(12)
    overlaps: Floats = both / shards
    return overlaps


def _by_host(group: DpGroup) -> Ints:
    """Returns the ranks of a dp group, [hosts, local ranks], padded with −1."""
    count = np.diff(group.starts, append=len(group.ranks))
    table = np.full((len(count), int(count.max())), -1, np.int64)
    table[np.arange(table.shape[1]) < count[:, None]] = group.ranks
    return table
