"""Where there is no more shared memory, messages within a host go by sockets, with one warning."""

import logging
from typing import Any

import torch

from distflow.comm import shared_memory
from distflow.comm.collectives import all_gather
from full import largest_file
from spawn import make_transport, spawn

SIZES = (100, 50_000, 400_000, 60_000, 5_000_000, 10, 500_000)  # bytes: some fit in what there is


def exchange(rank: int, room: int) -> tuple[list[bool], list[str]]:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    shared_memory.logger.addHandler(handler)
    transport: Any = make_transport(rank, 2)
    right = []
    with largest_file(room if rank == 0 else 1 << 30):  # the other has enough
        for size in SIZES:
            rows = transport.run(all_gather(rank, (0, 1), torch.full((size,), rank + 1, dtype=torch.uint8)))
            right.append(rows.shape == (2, size) and bool((rows[0] == 1).all() and (rows[1] == 2).all()))
    transport.close()
    return right, warned


def test_large_messages_arrive_without_shared_memory() -> None:
    for room in (0, 300_000):
        (right, warned), (others, none) = spawn(2, exchange, room)
        assert all(right)
        assert all(others)
        assert warned == ["no more shared memory (File too large): large messages within this host go by sockets"]
        assert not none
