"""Carries messages between workers that are threads of one process."""

from collections.abc import Generator
from itertools import product
from queue import Queue
from typing import Any

import torch

from distflow.comm.collectives import SendReceive


class Hub:
    """Carries messages between threads; a receiver that waits too long is stuck."""

    def __init__(self, workers: int) -> None:
        self.queues: dict[tuple[int, int], Queue[bytes]] = {p: Queue() for p in product(range(workers), range(workers))}

    def run(self, rank: int, communication: Generator[SendReceive, Any, None]) -> None:
        result = None
        while True:
            try:
                request = communication.send(result)
            except StopIteration:
                return
            data = torch.zeros(request.size, dtype=torch.uint8)
            if request.size:
                request.pack(data)
            for peer, (a, b) in request.send.items():
                self.queues[rank, peer].put(bytes(data[a:b].numpy()))
            for peer, (a, b) in request.receive.items():
                message = bytearray(self.queues[peer, rank].get(timeout=60))
                request.out[a:b] = torch.frombuffer(message, dtype=torch.uint8)
            result = request.out
