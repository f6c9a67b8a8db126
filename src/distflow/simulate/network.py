"""The network: bytes between workers take time on links and on CPUs, in the rounds of the workers' own code.

`exchange` is the one primitive, as in `comm/collectives.py`; all-gathers, trees and the weight sync are made of it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from distflow.config.model_shape import Floats
from distflow.plan.topology import Topology
from distflow.simulate.hardware import Hardware, Link
from distflow.util.arrays import Ints

Bools = NDArray[np.bool_]


class NetworkModel:
    """The links and CPUs of all workers. Counts what every worker sends, receives and spends on it."""

    def __init__(self, hardware: Hardware, hosts: Ints) -> None:
        n = len(hosts)
        self.hardware, self.hosts = hardware, hosts
        self._topology = Topology(tuple(hosts.tolist()))
        self.sent, self.received = np.zeros(n), np.zeros(n)  # bytes over the network
        self.sent_locally = np.zeros(n)  # bytes to workers of the same host
        self.messages, self.cpu_s = np.zeros(n), np.zeros(n)
        self.events = 0

    def exchange(
        self, sender: Ints, receiver: Ints, size: Floats, start: Floats, parts: int = 1, pack: bool = False
    ) -> Floats:
        """Sends `size` bytes from each sender to its receiver; returns when each worker is done.

        A worker starts at its `start`. Messages of several workers may share a link: it is then busy from the first of
        them on, for the time of all their bytes. The bytes go in `parts`, one after the other. With `pack`, they are
        first copied into one buffer.
        """
        if not len(sender):
            return start
        self.events += 1
        n, hw = len(start), self.hardware
        remote = self.hosts[sender] != self.hosts[receiver]
        out, into = np.bincount(sender, size, n), np.bincount(receiver, size, n)
        remote_out = np.bincount(sender[remote], size[remote], n)
        remote_in = np.bincount(receiver[remote], size[remote], n)
        count = parts * (np.bincount(sender, minlength=n) + np.bincount(receiver, minlength=n))
        self.sent += remote_out
        self.received += remote_in
        self.sent_locally += out - remote_out
        self.messages += parts * np.bincount(sender, minlength=n)
        taking_part = (out > 0) | (into > 0) | (count > 0)
        begin = self._compute(out / hw.cpu.pack_rate, start, taking_part) if pack else start
        end = self._compute(count * hw.cpu.message_s + (remote_out + remote_in) * hw.cpu.byte_s, begin, taking_part)
        done = self._on_links(sender, receiver, size, begin, remote, parts)
        end = end.copy()
        np.maximum.at(end, sender, done)
        np.maximum.at(end, receiver, done)
        return end

    def _compute(self, seconds: Floats, start: Floats, taking_part: Bools) -> Floats:
        """Returns when each worker is done with its CPU work, on cores that it may share with others."""
        self.cpu_s += seconds
        end = start + seconds
        cpu = self.hardware.cpu
        if cpu.per == "worker":
            return start + seconds / cpu.cores if cpu.cores < 1 else end
        share = self.hosts if cpu.per == "host" else np.zeros_like(self.hosts)
        groups = int(share.max()) + 1
        first = np.full(groups, np.inf)
        np.minimum.at(first, share[taking_part], start[taking_part])
        busy = first + np.bincount(share, seconds, groups) / cpu.cores
        return np.where(taking_part, np.maximum(end, busy[share]), end)

    def _on_links(self, sender: Ints, receiver: Ints, size: Floats, begin: Floats, remote: Bools, parts: int) -> Floats:
        """Returns the arrival of each message: when the slower of its two links has carried all its bytes."""
        start = np.maximum(begin[sender], begin[receiver])
        done = start.copy()
        for link, which, scale in (
            (self.hardware.network, remote, self.hardware.efficiency.network),
            (self.hardware.local, ~remote, 1.0),
        ):
            for end in (sender, receiver):
                place = end[which] if link.per == "worker" else self.hosts[end[which]]
                free = _drain(place, size[which], start[which], link, scale, parts)
                done[which] = np.maximum(done[which], free)
        return done

    def all_gather(self, groups: Ints, size: float, start: Floats) -> Floats:
        """Bruck's algorithm among the ranks of each group: in round k each sends its rows to the one 2^k before it."""
        n = groups.shape[1]
        now = start
        for k in range(math.ceil(math.log2(n)) if n > 1 else 0):
            blocks = min(1 << k, n - (1 << k))
            before = np.roll(groups, 1 << k, axis=1)
            now = self.exchange(groups.ravel(), before.ravel(), np.full(groups.size, size * blocks), now)
        return now

    def all_gather_by_host(self, groups: Ints, size: float, start: Floats) -> Floats:
        """The all-gather by host leaders: one rank of each host of a group sends and receives for all of them."""
        by_host = [self._topology.by_host(ranks) for ranks in groups.tolist()]
        if by_host[0] is None or any(hosts is None or len(hosts) != len(by_host[0]) for hosts in by_host):
            return self.all_gather(groups, size, start)
        table = np.array(by_host)  # [groups, hosts, ranks]
        first, others = np.repeat(table[:, :, 0].ravel(), table.shape[2] - 1), table[:, :, 1:].ravel()
        now = self.exchange(others, first, np.full(len(others), size), start)
        now = self.all_gather(table[:, :, 0], size * table.shape[2], now)
        return self.exchange(first, others, np.full(len(others), size * groups.shape[1]), now)

    def all_reduce(self, ranks: Ints, size: float, start: Floats) -> Floats:
        """A binomial tree to the first rank and back: the parent of place p is p without its lowest set bit."""
        places = np.arange(1, len(ranks))
        parents = places & (places - 1)
        step, level = places - parents, np.array([int(p).bit_count() for p in places], np.int64)
        now = start
        for s in np.unique(step):  # up: children in the order of their distance
            at = step == s
            now = self.exchange(ranks[places[at]], ranks[parents[at]], np.full(at.sum(), size), now)
        for depth in np.unique(level):  # down: to all children at once
            at = level == depth
            now = self.exchange(ranks[parents[at]], ranks[places[at]], np.full(at.sum(), size), now)
        return now


def _drain(place: Ints, size: Floats, start: Floats, link: Link, scale: float, parts: int) -> Floats:
    """Returns when the link of each message is free again, at the earliest when it has carried that message."""
    if not len(place):
        return start
    rate = link.rate * scale
    links = int(place.max()) + 1
    first = np.full(links, np.inf)
    np.minimum.at(first, place, start)
    free = first + np.bincount(place, size, links) / rate
    return np.maximum(free[place], start + size / rate) + parts * link.latency_s
