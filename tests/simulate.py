"""Runs N workers in one process: their own code, with messages carried out here. Finds any deadlock."""

from collections import Counter, deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distflow.comm.collectives import SendReceive


class DeadlockError(Exception):
    pass


@dataclass
class Traffic:
    """What was sent, by rank."""

    messages: Counter[int] = field(default_factory=Counter)
    bytes: Counter[int] = field(default_factory=Counter)


class _Pending:
    """A SendReceive that a worker is in. It is over once all it sends was received and all it receives has come."""

    def __init__(self, request: SendReceive) -> None:
        self.request = request
        self.data = torch.full((request.size,), 255, dtype=torch.uint8)
        if request.pieces:  # what a socket would send
            for peer, (start, end) in request.send.items():
                sent = bytearray(b"".join(request.pieces(peer)))
                assert len(sent) == end - start
                self.data[start:end] = torch.frombuffer(sent, dtype=torch.uint8)
        elif request.size:
            request.pack(self.data)
        self.send, self.receive = dict(request.send), dict(request.receive)

    def over(self) -> bool:
        return not self.send and not self.receive


def simulate(
    workers: Mapping[int, Generator[SendReceive, torch.Tensor, Any]], traffic: Traffic | None = None
) -> Traffic:
    """Runs all workers to their end. A message is sent when its receiver asks for it: nothing is buffered."""
    traffic = traffic or Traffic()
    pending: dict[int, _Pending] = {}
    ready: deque[tuple[int, torch.Tensor | None]] = deque((rank, None) for rank in workers)

    def transfer(sender: int, receiver: int) -> None:
        a, b = pending[sender], pending.get(receiver)
        if b is None or receiver not in a.send or sender not in b.receive:
            return
        (start, end), (into, until) = a.send.pop(receiver), b.receive.pop(sender)
        assert sender != receiver
        assert end - start == until - into > 0, (sender, receiver, end - start, until - into)
        if b.request.take:
            b.request.take(sender, a.data[start:end])
        else:
            b.request.out[into:until] = a.data[start:end]
        traffic.messages[sender] += 1
        traffic.bytes[sender] += end - start
        ready.extend((r, pending[r].request.out) for r in (sender, receiver) if pending[r].over())

    while ready:
        rank, result = ready.popleft()
        pending.pop(rank, None)
        try:
            pending[rank] = _Pending(workers[rank].send(result))  # type: ignore[arg-type]
        except StopIteration:
            continue
        if pending[rank].over():
            ready.append((rank, pending[rank].request.out))
            continue
        for peer in list(pending[rank].send):
            transfer(rank, peer)
        for peer in list(pending[rank].receive):
            if peer in pending:
                transfer(peer, rank)
    if pending:
        raise DeadlockError({r: (sorted(p.send), sorted(p.receive)) for r, p in pending.items()})
    return traffic
