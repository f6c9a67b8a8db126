"""The topology: which ranks share a host. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

HOST_RANKS = 8  # up to this number, one rank may send to all others of its host


@dataclass(frozen=True)
class Topology:
    """`hosts[rank]` is the index of the host that a rank is on."""

    hosts: tuple[int, ...]

    @classmethod
    def single(cls, workers: int) -> "Topology":
        """Returns the topology of workers that are all on one host."""
        return cls((0,) * workers)

    @classmethod
    def of(cls, host_ids: list[str]) -> "Topology":
        """Returns the topology of ranks whose hosts have these ids; hosts are numbered in the order of their ranks."""
        index = {host: i for i, host in enumerate(dict.fromkeys(host_ids))}
        return cls(tuple(index[host] for host in host_ids))

    def same_host(self, a: int, b: int) -> bool:
        return self.hosts[a] == self.hosts[b]

    def by_host(self, ranks: Sequence[int]) -> list[Sequence[int]] | None:
        """Returns `ranks` by host, if a collective should go through one rank of each host; else None.

        It should not if the ranks are in another order, unevenly many, alone on their hosts, or very many on each.
        """
        hosts = [self.hosts[r] for r in ranks]
        count = hosts.count(hosts[0])
        firsts = hosts[::count]
        if len(firsts) == 1 or not 1 < count <= HOST_RANKS:
            return None
        if len(set(firsts)) < len(firsts) or [h for h in firsts for _ in range(count)] != hosts:
            return None
        return [ranks[i : i + count] for i in range(0, len(ranks), count)]
