"""Collectives of N ranks in one process: the result on every rank, and how many messages it takes."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.comm.collectives import (
    Communication,
    SendReceive,
    all_gather,
    all_gather_by_host,
    all_gather_bytes,
    all_reduce,
    barrier,
)
from distflow.plan.topology import Topology
from simulate import DeadlockError, Traffic, simulate


def run(ranks: list[int], make: Callable[[int], Communication[Any]]) -> tuple[dict[int, Any], Traffic]:
    results: dict[int, Any] = {}

    def keep(rank: int) -> Communication[None]:
        results[rank] = yield from make(rank)

    return results, simulate({r: keep(r) for r in ranks})


RANKS = st.lists(st.integers(0, 10_000), min_size=1, max_size=70, unique=True)


@settings(max_examples=100, deadline=None)
@given(RANKS, st.sampled_from([torch.int32, torch.float64, torch.bool]), st.sampled_from([(), (0,), (1,), (3, 2)]))
def test_all_ranks_gather_the_data_of_all(ranks: list[int], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = {r: torch.full(shape, r % 7).to(dtype) for r in ranks}
    results, traffic = run(ranks, lambda r: all_gather(r, ranks, data[r]))
    expected = torch.stack([data[r] for r in ranks])
    assert all(torch.equal(results[r], expected) and results[r].dtype == dtype for r in ranks)
    rounds = math.ceil(math.log2(len(ranks))) if math.prod(shape) else 0
    assert all(traffic.messages[r] == rounds for r in ranks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from([(), (0,), (3, 2)]))
def test_gathering_by_host_gives_the_same_on_any_hosts(hosts: list[int], shape: tuple[int, ...]) -> None:
    ranks = range(len(hosts))
    data = {r: torch.full(shape, r, dtype=torch.int16) for r in ranks}
    results, _ = run(list(ranks), lambda r: all_gather_by_host(r, ranks, data[r], Topology(tuple(hosts))))
    expected = torch.stack([data[r] for r in ranks])
    assert all(torch.equal(results[r], expected) for r in ranks)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (16, 2), (5, 8), (128, 8)])
def test_gathering_by_host_one_rank_of_each_host_speaks_to_others(hosts: int, per_host: int) -> None:
    topology = Topology(tuple(h for h in range(hosts) for _ in range(per_host)))
    ranks = range(hosts * per_host)
    across: set[int] = set()

    def worker(rank: int) -> Communication[Any]:
        gather = all_gather_by_host(rank, ranks, torch.tensor([rank]), topology)
        filled = None
        while True:
            try:
                request = gather.send(filled)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            across.update(rank for peer in request.send if not topology.same_host(rank, peer))
            filled = yield request

    results, traffic = run(list(ranks), worker)
    assert all(torch.equal(results[r].flatten(), torch.arange(len(ranks))) for r in ranks)
    assert across == set(ranks[::per_host])
    rounds = math.ceil(math.log2(hosts))
    assert {traffic.messages[r] for r in across} == {rounds + per_host - 1}
    assert {traffic.messages[r] for r in ranks if r not in across} == {1}


@settings(max_examples=100, deadline=None)
@given(RANKS, st.randoms(use_true_random=False))
def test_bytes_of_any_length_are_gathered(ranks: list[int], rng: random.Random) -> None:
    data = {r: rng.randbytes(rng.choice([0, 1, 5, 300])) for r in ranks}
    results, _ = run(ranks, lambda r: all_gather_bytes(r, ranks, data[r]))
    assert all(results[r] == [data[s] for s in ranks] for r in ranks)


@settings(max_examples=100, deadline=None)
@given(RANKS, st.randoms(use_true_random=False))
def test_a_reduction_has_the_same_bits_on_every_rank(ranks: list[int], rng: random.Random) -> None:
    data = {r: torch.tensor([rng.uniform(-1e9, 1e9), rng.random()], dtype=torch.float64) for r in ranks}
    before = {r: d.clone() for r, d in data.items()}
    results, traffic = run(ranks, lambda r: all_reduce(r, ranks, data[r], torch.add))
    assert all(torch.equal(results[r], results[ranks[0]]) for r in ranks)
    assert torch.allclose(results[ranks[0]], sum(data.values()))  # type: ignore[arg-type]
    assert all(torch.equal(data[r], before[r]) for r in ranks)
    assert sum(traffic.messages.values()) == 2 * (len(ranks) - 1)
    assert max(traffic.messages.values(), default=0) <= 1 + math.ceil(math.log2(len(ranks)))


@settings(max_examples=50, deadline=None)
@given(RANKS)
def test_a_reduction_keeps_the_order_of_the_ranks(ranks: list[int]) -> None:
    """The operation need not be commutative: here, the later rank wins unless it is zero."""
    results, _ = run(ranks, lambda r: all_reduce(r, ranks, torch.tensor([r]), lambda a, b: torch.where(b > 0, b, a)))
    last = next((r for r in reversed(ranks) if r), 0)
    assert all(int(results[r]) == last for r in ranks)


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    came: set[int] = set()

    def worker(rank: int) -> Communication[None]:
        came.add(rank)
        yield from barrier(rank, range(37))
        assert came == set(range(37))

    simulate({r: worker(r) for r in range(37)})


def test_the_simulation_finds_a_deadlock() -> None:
    """Two ranks that both receive before they send wait for each other for ever."""

    def walk(peer: int, *directions: str) -> Communication[None]:
        for direction in directions:
            sends = {peer: (0, 1)} if direction == "send" else {}
            receives = {} if sends else {peer: (0, 1)}
            out = torch.zeros(len(receives), dtype=torch.uint8)
            yield SendReceive(len(sends), lambda data: None, sends, out, receives)

    assert simulate({0: walk(1, "send", "receive"), 1: walk(0, "receive", "send")}).messages == {0: 1, 1: 1}
    with pytest.raises(DeadlockError):
        simulate({0: walk(1, "receive", "send"), 1: walk(0, "receive", "send")})
