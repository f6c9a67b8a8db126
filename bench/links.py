"""Steps on shaped hosts, in seconds and in bytes on their links. Used by bench/scaling.py; not run by itself."""

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from controller import run_controller
from steps import Work, run_steps
from workers import Hosts

PORT, TIMEOUT_S = 9000, 900


@dataclass(frozen=True)
class Measured:
    """Steps of one system: seconds of each, and the bytes that each host sent and received in one, on average."""

    seconds: list[float]
    links: list[tuple[float, float]]
    messages: float = 0.0  # of a worker and step
    cpu_s: float = 0.0  # of all workers and a step

    @property
    def s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def busiest(self) -> float:
        """Bytes of the busiest direction of all links."""
        return max(max(link) for link in self.links)

    @property
    def busiest_ratio(self) -> float:
        return self.busiest / max(1.0, statistics.mean(x for link in self.links for x in link))

    def as_dict(self) -> dict[str, Any]:
        row = {"s": self.s, "min_s": min(self.seconds), "busiest_link_mib": self.busiest / 2**20}
        return {k: round(v, 4) for k, v in row.items()} | {"steps": len(self.seconds), "cpu_s": round(self.cpu_s, 4)}


def bytes_between(before: Sequence[tuple[int, int]], hosts: Hosts, steps: int) -> list[tuple[float, float]]:
    after = [host.traffic() for host in hosts]
    return [((b[0] - a[0]) / steps, (b[1] - a[1]) / steps) for a, b in zip(before, after, strict=True)]


def decentralised(hosts: Hosts, per_host: int, work: Work, steps: int, folder: str) -> Measured:
    """Our own steps; the first one, which connects everybody, is not counted."""
    before = [host.traffic() for host in hosts]
    workers = hosts.fork(per_host, run_steps, work, steps + 1, folder, timeout_s=TIMEOUT_S)
    ends = [max(w["rows"][k]["end"] for w in workers) for k in range(1, steps + 2)]
    sent = statistics.mean(w["rows"][-1]["messages"] - w["rows"][1]["messages"] for w in workers)
    cpu_s = sum(w["rows"][-1]["cpu_s"] - w["rows"][1]["cpu_s"] for w in workers)
    links = bytes_between(before, hosts, steps + 1)
    return Measured([b - a for a, b in pairwise(ends)], links, sent / steps, cpu_s / steps)


def controlled(hosts: Hosts, per_host: int, work: Work, steps: int, cgroup: int | None = None) -> Measured:
    """The steps of the single controller; one of few tokens, which connects everybody, is not counted."""
    before = [host.traffic() for host in hosts]
    ends = hosts.fork(per_host + 1, run_controller, per_host, work, steps, cgroup, timeout_s=TIMEOUT_S)
    last = [max(e[k] for e in ends if e) for k in range(steps + 1)]
    return Measured([b - a for a, b in pairwise(last)], bytes_between(before, hosts, steps))


def bare(hosts: Hosts, size: int) -> float:
    """Returns the seconds in which every host sends `size` bytes to the next one, and receives as much."""
    addresses = [host.address for host in hosts]
    return max(hosts.fork(1, _stream, addresses, size, timeout_s=TIMEOUT_S))


def _stream(rank: int, addresses: list[str], size: int) -> float:
    with socket.create_server((addresses[rank], PORT)) as server:
        outgoing = _connect(addresses[(rank + 1) % len(addresses)])
        incoming, _ = server.accept()
        with incoming, outgoing:
            outgoing.sendall(b"!")
            incoming.recv(1)  # both neighbours are there
            start = time.perf_counter()
            sender = threading.Thread(target=outgoing.sendall, args=(bytes(size),))
            sender.start()
            left = size
            while left:
                left -= len(incoming.recv(min(left, 1 << 20)))
            sender.join()
            return time.perf_counter() - start


def _connect(address: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, PORT), 5)
        except ConnectionRefusedError:
            time.sleep(0.02)
