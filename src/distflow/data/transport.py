"""Carry out collectives: among neighbours through shared memory, else over `torch.distributed` (gloo, NCCL on GPUs)."""

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
from distflow.data.shared_memory import Meeting, Neighbours, host_id
from distflow.errors import PeerLostError
from distflow.plan.layout import format_ranks

T = TypeVar("T")

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the same, by its older name

SHARED_MEMORY = "DISTFLOW_SHARED_MEMORY"  # 0: never, all goes over torch.distributed


class Transport:
    """The rank sets that a plan's moves need. All ranks build it from the same plan."""

    def __init__(
        self,
        rank_sets: Iterable[tuple[int, ...]],
        device: torch.device,
        waiting: Callable[[tuple[int, ...]], AbstractContextManager[None]],
    ) -> None:
        self.device, self.waiting = device, waiting
        sets = [ranks for ranks in dict.fromkeys(rank_sets) if len(ranks) > 1]
        shared = device.type == "cpu" and sys.platform == "linux" and os.environ.get(SHARED_MEMORY) != "0"
        near, links = _meet(sets) if sets and shared else ([], {})
        rank = dist.get_rank()
        self._neighbours = {ranks: Neighbours(rank, ranks, links) for ranks in near if rank in ranks}
        self._groups = {ranks: dist.new_group(list(ranks)) for ranks in sets if ranks not in near}
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def drive(self, steps: Generator[Collective, Tensor, T]) -> T:
        """Run a generator that yields collectives to its end."""
        try:
            wish = next(steps)
            while True:
                wish = steps.send(self.perform(wish))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def perform(self, wish: Collective) -> Tensor:
        if len(wish.ranks) == 1:
            return wish.data[None] if isinstance(wish, AllGather) else wish.out
        near = self._neighbours.get(wish.ranks)
        if isinstance(wish, AllGather):
            with self.waiting(wish.ranks):
                return near.gather(wish.data) if near else self._gather(wish.ranks, wish.data)
        with self.waiting(wish.ranks):
            data = (near.outbox if near else self._outbox)(sum(wish.send))
        wish.pack(data)
        with self.waiting(wish.ranks):
            if near:
                near.deal(wish.send, wish.out, wish.receive)
            else:
                self._all_to_all(wish.ranks, wish.out, data, wish.receive, wish.send)
        return wish.out

    def _outbox(self, size: int) -> Tensor:
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._scratch[:size]

    def _gather(self, ranks: tuple[int, ...], data: Tensor) -> Tensor:
        data = data.to(self.device)
        out = data.new_empty(len(ranks), len(data))
        if self.device.type == "cpu":
            # gloo gathers around a ring, one hop after the other; sending to all at once is one hop.
            even = [1] * len(ranks)
            self._all_to_all(ranks, out, data.expand_as(out).contiguous(), even, even)
        else:
            with naming_lost_peers(ranks):
                all_gather(out.view(-1), data, group=self._groups[ranks])
        return out

    def _all_to_all(
        self, ranks: tuple[int, ...], out: Tensor, data: Tensor, receive: list[int], send: list[int]
    ) -> None:
        with naming_lost_peers(ranks):
            dist.all_to_all_single(out, data, receive, send, group=self._groups[ranks])


def _meet(sets: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], dict[int, socket.socket]]:
    """The sets whose ranks are all on one host, and links to the ranks of this host."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    try:
        meeting, address = Meeting(), host_id()
    except OSError:  # a sandbox that forbids it: this rank has no neighbours, and everybody gets to know
        meeting, address = None, f"alone-{rank}"
    mine = f"{address} {meeting.name if meeting else '-'}".encode().ljust(256)
    everybody = torch.empty(workers, len(mine), dtype=torch.uint8)
    dist.all_to_all_single(everybody, torch.frombuffer(bytearray(mine * workers), dtype=torch.uint8).view(workers, -1))
    hosts, names = zip(*(bytes(row.tolist()).decode().split() for row in everybody), strict=True)
    links = meeting.connect(rank, {r: names[r] for r in range(workers) if hosts[r] == address}) if meeting else {}
    return [ranks for ranks in sets if len({hosts[r] for r in ranks}) == 1], links


@contextmanager
def naming_lost_peers(ranks: tuple[int, ...]) -> Iterator[None]:
    """Who was lost, if a collective among these ranks breaks."""
    try:
        yield
    except RuntimeError as e:  # gloo and NCCL say no more than this when a peer goes away
        raise PeerLostError(f"lost one of ranks {format_ranks(ranks)}: {reason(e)}") from e


def lost(error: BaseException) -> bool:
    """Whether a collective inside a node broke because a peer went away."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def reason(error: BaseException) -> str:
    """The first sentence of what the backend says, without the place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition(". ")[0].partition("\n")[0]
