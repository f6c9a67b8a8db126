"""Executes collectives: through shared memory within a host, else over `torch.distributed` (gloo, NCCL on GPUs)."""

import os
import re
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.exchange import AllGather, Collective
from distflow.data.shared_memory import HostRendezvous, SharedMemoryCollectives, host_id
from distflow.errors import PeerLostError
from distflow.plan.layout import format_ranks

T = TypeVar("T")

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in older versions

SHARED_MEMORY = "DISTFLOW_SHARED_MEMORY"  # environment variable; 0: use torch.distributed only


class Transport:
    """Communicates within the rank sets that a plan's moves need. All ranks create it from the same plan.

    Samples are in host memory. Weights are on `device`; what is there goes over the backend of that device.
    `waiting` is entered while this rank may be waiting for the given ranks.
    """

    def __init__(
        self,
        rank_sets: Iterable[tuple[int, ...]],
        device: torch.device,
        waiting: Callable[[tuple[int, ...]], AbstractContextManager[None]],
    ) -> None:
        self.waiting = waiting
        sets = [ranks for ranks in dict.fromkeys(rank_sets) if len(ranks) > 1]
        shared = sys.platform == "linux" and os.environ.get(SHARED_MEMORY) != "0"
        local, sockets = _find_local(sets) if sets and shared else ([], {})
        rank = dist.get_rank()
        self._shared_memory = {ranks: SharedMemoryCollectives(rank, ranks, sockets) for ranks in local if rank in ranks}
        connected = [ranks for ranks in sets if device.type != "cpu" or ranks not in local]
        self._process_groups = {ranks: dist.new_group(list(ranks)) for ranks in connected}
        self._buffers: dict[torch.device, Tensor] = {}  # to send from

    def run(self, collectives: Generator[Collective, Tensor, T]) -> T:
        """Runs a generator to its end, executing each collective it yields; returns the generator's result."""
        try:
            collective = next(collectives)
            while True:
                collective = collectives.send(self.execute(collective))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def execute(self, collective: Collective) -> Tensor:
        """Returns [ranks, length] of an AllGather, or the filled `out` of an AllToAll."""
        ranks = collective.ranks
        if len(ranks) == 1:
            return collective.data[None] if isinstance(collective, AllGather) else collective.out
        shared = self._shared_memory.get(ranks)
        if isinstance(collective, AllGather):
            with self.waiting(ranks):
                return shared.all_gather(collective.data) if shared else self._all_gather(ranks, collective.data)
        device = collective.out.device
        if device.type != "cpu":
            shared = None
        with self.waiting(ranks):
            size = sum(collective.send)
            data = shared.send_buffer(size) if shared else self._send_buffer(size, device)
        collective.pack(data)
        with self.waiting(ranks):
            if shared:
                shared.all_to_all(collective.send, collective.out, collective.receive)
            else:
                self._all_to_all(ranks, collective.out, data, collective.receive, collective.send)
        return collective.out

    def _send_buffer(self, size: int, device: torch.device) -> Tensor:
        buffer = self._buffers.get(device)
        if buffer is None or len(buffer) < size:
            self._buffers.pop(device, None)  # frees it before there is a larger one
            buffer = self._buffers[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size]

    def _all_gather(self, ranks: tuple[int, ...], data: Tensor) -> Tensor:
        out = data.new_empty(len(ranks), len(data))
        # gloo gathers around a ring, one hop after the other; sending to all at once is one hop.
        even = [1] * len(ranks)
        self._all_to_all(ranks, out, data.expand_as(out).contiguous(), even, even)
        return out

    def _all_to_all(
        self, ranks: tuple[int, ...], out: Tensor, data: Tensor, receive: list[int], send: list[int]
    ) -> None:
        with report_lost_peers(ranks):
            dist.all_to_all_single(out, data, receive, send, group=self._process_groups[ranks])


def _find_local(sets: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], dict[int, socket.socket]]:
    """Returns the rank sets that are within one host each, and a socket to every other rank of this host."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    try:
        rendezvous, host = HostRendezvous(), host_id()
    except OSError:  # forbidden by a sandbox: all ranks learn that this one shares no memory
        rendezvous, host = None, f"alone-{rank}"
    own = f"{host} {rendezvous.name if rendezvous else '-'}".encode().ljust(256)
    gathered = torch.empty(workers, len(own), dtype=torch.uint8)
    dist.all_to_all_single(gathered, torch.frombuffer(bytearray(own * workers), dtype=torch.uint8).view(workers, -1))
    hosts, names = zip(*(bytes(row.tolist()).decode().split() for row in gathered), strict=True)
    local = {r: names[r] for r in range(workers) if hosts[r] == host}
    sockets = rendezvous.connect(rank, local) if rendezvous else {}
    return [ranks for ranks in sets if len({hosts[r] for r in ranks}) == 1], sockets


@contextmanager
def report_lost_peers(ranks: tuple[int, ...]) -> Iterator[None]:
    """Turns the error of a collective among these ranks into a PeerLostError that names them."""
    try:
        yield
    except RuntimeError as e:  # all that gloo and NCCL raise when a peer is gone
        raise PeerLostError(f"lost one of ranks {format_ranks(ranks)}: {short_message(e)}") from e


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether a collective inside a node failed because a peer is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def short_message(error: BaseException) -> str:
    """Returns the first sentence of a backend's error message, without the location in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition(". ")[0].partition("\n")[0]
