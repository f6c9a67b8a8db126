"""Runs N workers in one process: their own code, with collectives carried out here. Finds any deadlock."""

from collections.abc import Generator, Mapping
from typing import Any

import torch

from distflow.data.exchange import AllGather, AllToAll, Collective


class DeadlockError(Exception):
    pass


def simulate(workers: Mapping[int, Generator[Collective, torch.Tensor, Any]]) -> int:
    """Runs all workers to their end; returns the number of collectives carried out."""
    count = 0
    pending: dict[int, Collective] = {}

    def advance(rank: int, result: torch.Tensor | None) -> None:
        try:
            pending[rank] = workers[rank].send(result)  # type: ignore[arg-type]
        except StopIteration:
            pending.pop(rank, None)

    for rank in workers:
        advance(rank, None)
    while pending:
        ready = [r for r, c in pending.items() if all(_matches(c, pending.get(p)) for p in c.ranks)]
        if not ready:
            raise DeadlockError({r: (type(c).__name__, c.ranks) for r, c in pending.items()})
        ranks = pending[ready[0]].ranks
        results = _perform({r: pending[r] for r in ranks})
        count += 1
        for r in ranks:
            advance(r, results[r])
    return count


def _matches(a: Collective, b: Collective | None) -> bool:
    return type(a) is type(b) and b is not None and a.ranks == b.ranks


def _perform(pending: dict[int, Collective]) -> dict[int, torch.Tensor]:
    gathers = [c for c in pending.values() if isinstance(c, AllGather)]
    if gathers:
        rows = torch.stack([c.data for c in gathers])
        return {r: rows.clone() for r in pending}
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for r, c in pending.items():
        assert isinstance(c, AllToAll)
        data = torch.full((sum(c.send),), 255, dtype=torch.uint8)
        c.pack(data)
        for to, piece in zip(c.ranks, data.split(c.send), strict=True):
            pieces[r, to] = piece
    results = {}
    for r, c in pending.items():
        assert isinstance(c, AllToAll)
        for source, buffer in zip(c.ranks, c.out.split(c.receive), strict=True):
            buffer.copy_(pieces[source, r])  # fails if the two do not agree on the size
        results[r] = c.out
    return results
