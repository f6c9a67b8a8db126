"""Tree gather of equal-sized pieces."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distflow.comm.collectives import Communication, SendReceive
from distflow.weights.sync_group import FAN_IN

Write = Callable[[Tensor], None]  # fills the memory that is sent


def pieces_per_message(n: int) -> int:
    """Returns how many pieces of n come to the root in one message: one, unless that makes too many messages."""
    width = 1
    while n > width * FAN_IN:
        width *= FAN_IN
    return width


def tree_gather(
    ranks: Sequence[int], place: int, unit: int, write: Write, device: torch.device
) -> Communication[tuple[int, Write] | None]:
    """Gathers a piece of `unit` bytes from each of `ranks` on the few of them that send to the root.

    Returns how many pieces this rank is to send and the function that writes them; None if another rank sends them.
    """
    n, width = len(ranks), 1
    while n > width * FAN_IN:
        group = width * FAN_IN
        count, end = min(width, n - place), min(group, n - place)
        if place % group:
            head = ranks[place - place % group]
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            yield SendReceive(count * unit, write, {head: (0, count * unit)}, nothing, {})
            return None
        memory = torch.empty(end * unit, dtype=torch.uint8, device=device)
        write(memory[: count * unit])
        others = {ranks[place + k]: (k * unit, min(k + width, end) * unit) for k in range(width, end, width)}
        if others:
            yield SendReceive(0, lambda out: None, {}, memory, others)
        write, width = _writer(memory), group
    return min(width, n - place), write


def _writer(data: Tensor) -> Write:
    def write(out: Tensor) -> None:
        out.copy_(data)

    return write
