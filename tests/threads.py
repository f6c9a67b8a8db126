"""Executes what workers send each other between threads of one process, or of a single worker, which sends nothing."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import torch

from distflow.comm.collectives import Communication

Run = Callable[[Communication[Any]], Any]


class Threads:
    """`run(rank)` is what a transport's `run` is on a worker."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)

    def run(self, rank: int) -> Run:
        def run(communication: Communication[Any]) -> Any:
            result = None
            while True:
                try:
                    request = communication.send(result)  # type: ignore[arg-type]
                except StopIteration as end:
                    return end.value
                data = torch.empty(request.size, dtype=torch.uint8)
                request.pack(data)
                for peer, (start, stop) in request.send.items():
                    self._queues[rank, peer].put(data[start:stop].clone())
                for peer, (start, stop) in request.receive.items():
                    request.out[start:stop] = self._queues[peer, rank].get(timeout=30)
                result = request.out

        return run


def on_ranks(n: int, fn: Callable[[int, Run], Any]) -> list[Any]:
    """fn(rank, run) on n threads; returns what they return, or the exception that they raise."""
    threads = Threads()
    for a in range(n):
        for b in range(n):
            threads._queues[a, b]  # made here: a defaultdict is not for several threads

    def attempt(rank: int) -> Any:
        try:
            return fn(rank, threads.run(rank))
        except Exception as e:
            return e

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(attempt, range(n)))


alone = Threads().run(0)
