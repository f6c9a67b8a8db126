"""Carry out collectives over `torch.distributed`: gloo on CPU, NCCL on GPUs."""

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.data.exchange import AllGather, AllToAll, Collective
from distflow.errors import PeerLostError
from distflow.plan.layout import format_ranks

T = TypeVar("T")

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name of the same thing


class Comm:
    """Process groups for the rank sets that a plan's moves need. All ranks build it from the same plan."""

    def __init__(
        self,
        rank_sets: Iterable[tuple[int, ...]],
        device: torch.device,
        waiting: Callable[[tuple[int, ...]], AbstractContextManager[None]],
    ) -> None:
        self.device, self.waiting = device, waiting
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(rank_sets) if len(ranks) > 1}

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
        group = self.groups[wish.ranks]
        with self.waiting(wish.ranks):
            try:
                if isinstance(wish, AllToAll):
                    dist.all_to_all_single(wish.out, wish.data, wish.receive, wish.send, group=group)
                    return wish.out
                data = wish.data.to(self.device)
                out = data.new_empty(len(wish.ranks), len(data))
                if self.device.type == "cpu":
                    # gloo gathers around a ring, one hop after the other; sending to all at once is one hop.
                    dist.all_to_all_single(out, data.expand_as(out).contiguous(), group=group)
                else:
                    all_gather(out.view(-1), data, group=group)
                return out
            except RuntimeError as e:  # gloo and NCCL say no more than this when a peer goes away
                raise PeerLostError(f"lost one of ranks {format_ranks(wish.ranks)}: {_reason(e)}") from e


def _reason(error: RuntimeError) -> str:
    """The first sentence of what the backend says, without the place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition(". ")[0].partition("\n")[0]
