"""N workers in one process: the worker's own code, its collectives carried out here. Finds any deadlock."""

from collections.abc import Generator, Mapping
from typing import Any

import torch

from distflow.data.exchange import AllGather, AllToAll, Collective


class DeadlockError(Exception):
    pass


def simulate(workers: Mapping[int, Generator[Collective, torch.Tensor, Any]]) -> int:
    """Run all to their end; the number of collectives carried out."""
    done = 0
    wishes: dict[int, Collective] = {}

    def advance(rank: int, result: torch.Tensor | None) -> None:
        try:
            wishes[rank] = workers[rank].send(result)  # type: ignore[arg-type]
        except StopIteration:
            wishes.pop(rank, None)

    for rank in workers:
        advance(rank, None)
    while wishes:
        ready = [r for r, w in wishes.items() if all(_agrees(w, wishes.get(p)) for p in w.ranks)]
        if not ready:
            raise DeadlockError({r: (type(w).__name__, w.ranks) for r, w in wishes.items()})
        ranks = wishes[ready[0]].ranks
        results = _perform({r: wishes[r] for r in ranks})
        done += 1
        for r in ranks:
            advance(r, results[r])
    return done


def _agrees(a: Collective, b: Collective | None) -> bool:
    return type(a) is type(b) and b is not None and a.ranks == b.ranks


def _perform(wishes: dict[int, Collective]) -> dict[int, torch.Tensor]:
    gathers = [w for w in wishes.values() if isinstance(w, AllGather)]
    if gathers:
        rows = torch.stack([w.data for w in gathers])
        return {r: rows.clone() for r in wishes}
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for r, w in wishes.items():
        assert isinstance(w, AllToAll)
        data = torch.full((sum(w.send),), 255, dtype=torch.uint8)
        w.pack(data)
        for to, piece in zip(w.ranks, data.split(w.send), strict=True):
            pieces[r, to] = piece
    results = {}
    for r, w in wishes.items():
        assert isinstance(w, AllToAll)
        for source, room in zip(w.ranks, w.out.split(w.receive), strict=True):
            room.copy_(pieces[source, r])  # fails if the two do not agree on the size
        results[r] = w.out
    return results
