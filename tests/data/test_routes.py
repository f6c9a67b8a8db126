"""Routes: locality first, then balance; equal counts; whole groups where asked; replicas speak once and share that."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distflow.data.balance import imbalance
from distflow.data.routes import contiguous, deal, route
from distflow.plan import Layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True))
    tp = draw(st.sampled_from([t for t in range(1, len(ranks) + 1) if len(ranks) % t == 0]))
    return Layout(tuple(ranks), len(ranks) // tp, tp)


@st.composite
def deals(draw: st.DrawFn) -> tuple[Layout, Layout, np.ndarray, np.ndarray, int, bool]:
    src, dst = draw(layouts()), draw(layouts())
    group = draw(st.sampled_from([1, 2, 3]))
    n = math.lcm(src.dp, dst.dp) * draw(st.integers(1, 3)) * group
    assume(n <= 300)
    owner = np.array(draw(st.permutations(list(contiguous(n // group, src.dp)))))
    weights = np.array(draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n)))
    return src, dst, np.repeat(owner, group), weights, group, draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(deals())
def test_every_sample_is_dealt_once_and_every_cell_gets_as_many(case) -> None:
    src, dst, owner, weights, group, balance = case
    new = deal(owner, src, dst, weights, group, balance)
    assert (np.bincount(new, minlength=dst.dp) == len(owner) // dst.dp).all()
    assert (new.reshape(-1, group) == new.reshape(-1, group)[:, :1]).all()  # groups are whole


@settings(max_examples=300, deadline=None)
@given(deals())
def test_senders_and_receivers_agree_and_replicas_speak_once(case) -> None:
    src, dst, owner, weights, group, balance = case
    new = deal(owner, src, dst, weights, group, balance)
    routes = {r: route(r, src, dst, owner, new) for r in {*src.ranks, *dst.ranks}}
    for r, mine in routes.items():
        cell = dst.cell_of(r)
        got = np.concatenate([mine.keep, *mine.receive.values()])
        want = [] if cell is None else np.flatnonzero(new == cell).tolist()
        assert sorted(got.tolist()) == want  # each wanted sample comes exactly once, from one replica
        for sender, slots in mine.receive.items():
            assert sender != r
            assert list(routes[sender].send[r]) == list(slots)
        for to, slots in mine.send.items():
            assert list(routes[to].receive[r]) == list(slots)
        here = src.cell_of(r)
        assert (owner[mine.keep] == here).all()  # a sample that is here is not sent here


def test_nothing_moves_when_it_need_not() -> None:
    everybody = tuple(range(8))
    for src, dst in [
        (Layout(everybody, 8), Layout(everybody, 8)),
        (Layout(everybody, 4, 2), Layout(everybody, 8)),
        (Layout(everybody, 1, 8), Layout(everybody, 4, 2)),
    ]:
        owner = contiguous(64, src.dp)
        new = deal(owner, src, dst, np.arange(64), 1, balance=False)
        assert not any(route(r, src, dst, owner, new).send for r in everybody)


def test_replicas_share_the_sending() -> None:
    src, dst = Layout((0, 1, 2, 3), 1, 4), Layout((4,), 1)
    owner = np.zeros(12, np.int64)
    assert [len(route(r, src, dst, owner, owner).send[4]) for r in range(4)] == [3, 3, 3, 3]
    # One sample for each of four receivers: not all from the first replica.
    dst = Layout((4, 5, 6, 7), 4)
    sends = [route(r, src, dst, owner[:4], np.arange(4)).send for r in range(4)]
    assert sorted(len(s) for s in sends) == [1, 1, 1, 1]


def heavy_tailed(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = 400 * np.exp(rng.normal(0, 0.5, count))
    lengths[rng.random(count) < 0.01] = 8000
    return lengths.astype(np.int64)


@pytest.mark.parametrize("workers", [2, 8, 64, 256])
@pytest.mark.parametrize("seed", range(5))
def test_tokens_are_even_on_heavy_tailed_lengths(workers: int, seed: int) -> None:
    lengths, owner = heavy_tailed(64 * workers, seed), contiguous(64 * workers, workers)
    layout, other = Layout(tuple(range(workers)), workers), Layout(tuple(range(workers, 2 * workers)), workers)
    balanced = deal(owner, layout, layout, lengths, 1, balance=True)
    assert imbalance(balanced, lengths, workers) < 0.02
    assert (balanced == owner).mean() > 0.85  # and most samples have stayed where they were
    moved = deal(owner, layout, other, lengths, 1, balance=False)  # all have to move: evenly, unasked
    assert imbalance(moved, lengths, workers) < 0.02


def test_one_giant_does_not_keep_the_others_from_being_even() -> None:
    lengths = heavy_tailed(64 * 8, 0)
    lengths[0] = lengths.sum()
    layout = Layout(tuple(range(8)), 8)
    new = deal(contiguous(512, 8), layout, layout, lengths, 1, balance=True)
    loads = np.bincount(new, lengths, 8)
    rest = np.delete(loads, new[0])
    assert (rest.max() - rest.min()) / rest.mean() < 0.02
