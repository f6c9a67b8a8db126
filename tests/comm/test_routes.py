"""Routes: locality first, then balance; equal counts; complete groups; replicas send each sample once, in turns."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distflow.comm.balance import imbalance
from distflow.comm.routes import assign_replicas, contiguous_replicas, route
from distflow.plan import Layout
from distflow.plan.topology import Topology


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    tp = draw(st.sampled_from([t for t in range(1, len(ranks) + 1) if len(ranks) % t == 0]))
    return Layout(tuple(ranks), len(ranks) // tp, tp)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, Layout, np.ndarray, np.ndarray, int, bool]:
    src, dst = draw(layouts()), draw(layouts())
    group_size = draw(st.sampled_from([1, 2, 3]))
    even = math.lcm(src.dp, dst.dp) * draw(st.integers(1, 3))
    n = draw(st.sampled_from([even, draw(st.integers(1, 20))])) * group_size
    assume(n <= 300)
    old = np.array(draw(st.permutations(list(contiguous_replicas(n // group_size, src.dp)))))
    weights = np.array(draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n)))
    return src, dst, np.repeat(old, group_size), weights, group_size, draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_sample_gets_one_cell_and_all_replicas_get_as_many_as_the_loader_gives_them(case) -> None:
    src, dst, old, weights, group_size, balance = case
    new = assign_replicas(old, src, dst, weights, group_size, balance)
    shares = np.bincount(contiguous_replicas(len(old) // group_size, dst.dp), minlength=dst.dp)
    assert (np.bincount(new, minlength=dst.dp) == shares * group_size).all()
    assert (new.reshape(-1, group_size) == new.reshape(-1, group_size)[:, :1]).all()  # groups are complete


@settings(max_examples=300, deadline=None)
@given(cases())
def test_senders_and_receivers_agree_and_one_replica_sends(case) -> None:
    src, dst, old, weights, group_size, balance = case
    new = assign_replicas(old, src, dst, weights, group_size, balance)
    routes = {r: route(r, src, dst, old, new) for r in {*src.ranks, *dst.ranks}}
    for r, mine in routes.items():
        replica = dst.replica_of(r)
        got = np.concatenate([mine.keep, *mine.receive.values()])
        want = [] if replica is None else np.flatnonzero(new == replica).tolist()
        assert sorted(got.tolist()) == want  # each wanted sample comes exactly once, from one replica
        for sender, slots in mine.receive.items():
            assert sender != r
            assert list(routes[sender].send[r]) == list(slots)
        for to, slots in mine.send.items():
            assert list(routes[to].receive[r]) == list(slots)
        here = src.replica_of(r)
        assert (old[mine.keep] == here).all()  # a sample that is here is not sent here


def test_nothing_moves_unless_it_must() -> None:
    all_ranks = tuple(range(8))
    for src, dst in [
        (Layout(all_ranks, 8), Layout(all_ranks, 8)),
        (Layout(all_ranks, 4, 2), Layout(all_ranks, 8)),
        (Layout(all_ranks, 1, 8), Layout(all_ranks, 4, 2)),
    ]:
        old = contiguous_replicas(64, src.dp)
        new = assign_replicas(old, src, dst, np.arange(64), 1, balance=False)
        assert not any(route(r, src, dst, old, new).send for r in all_ranks)


def test_replicas_share_the_sending() -> None:
    src, dst = Layout((0, 1, 2, 3), 1, 4), Layout((4,), 1)
    old = np.zeros(12, np.int64)
    assert [len(route(r, src, dst, old, old).send[4]) for r in range(4)] == [3, 3, 3, 3]
    # One sample for each of four receivers: not all from the first replica.
    dst = Layout((4, 5, 6, 7), 4)
    sends = [route(r, src, dst, old[:4], np.arange(4)).send for r in range(4)]
    assert sorted(len(s) for s in sends) == [1, 1, 1, 1]


def heavy_tailed(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = 400 * np.exp(rng.normal(0, 0.5, count))
    lengths[rng.random(count) < 0.01] = 8000
    return lengths.astype(np.int64)


@pytest.mark.parametrize("workers", [2, 8, 64, 256])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_even_on_heavy_tailed_lengths(workers: int, seed: int) -> None:
    lengths, old = heavy_tailed(64 * workers, seed), contiguous_replicas(64 * workers, workers)
    layout, other = Layout(tuple(range(workers)), workers), Layout(tuple(range(workers, 2 * workers)), workers)
    balanced = assign_replicas(old, layout, layout, lengths, 1, balance=True)
    assert imbalance(balanced, lengths, workers) < 0.02
    assert (balanced == old).mean() > 0.85  # and most samples have stayed where they were
    moved = assign_replicas(
        old, layout, other, lengths, 1, balance=False
    )  # all have to move: evenly even without `balance`
    assert imbalance(moved, lengths, workers) < 0.02


def test_one_huge_sample_does_not_unbalance_the_other_replicas() -> None:
    lengths = heavy_tailed(64 * 8, 0)
    lengths[0] = lengths.sum()
    layout = Layout(tuple(range(8)), 8)
    new = assign_replicas(contiguous_replicas(512, 8), layout, layout, lengths, 1, balance=True)
    loads = np.bincount(new, lengths, 8)
    rest = np.delete(loads, new[0])
    assert (rest.max() - rest.min()) / rest.mean() < 0.02


def test_a_replica_on_the_host_of_the_receiver_sends() -> None:
    """Replicas of two ranks on two hosts; of a replica, the rank on the receiver's host sends everything to it."""
    src, dst = Layout((0, 1, 2, 3), 2, 2), Layout((4, 5), 2)
    old, new = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    topology = Topology((0, 1, 0, 1, 0, 1))
    assert set(route(4, src, dst, old, new, topology).receive) == {0, 2}
    assert set(route(5, src, dst, old, new, topology).receive) == {1, 3}
    assert list(route(0, src, dst, old, new, topology).send) == [4]
    elsewhere = Topology((0, 0, 0, 0, 1, 1))  # none is near: in turn
    assert len({*route(4, src, dst, old, new, elsewhere).receive, *route(5, src, dst, old, new, elsewhere).receive}) > 2
