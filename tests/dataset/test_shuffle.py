"""The shuffle is a permutation for every n, depends on seed and epoch, and looks random."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.dataset.shuffle import permute


def shuffle(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [int(i) for i in permute(np.arange(n), n, seed, epoch)]


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 1023, 1024, 1025, 4096, 4097, 65536, 65537])
def test_every_index_comes_exactly_once(n: int) -> None:
    assert sorted(shuffle(n, seed=7, epoch=3)) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_it_is_a_bijection_for_any_key(n: int, seed: int, epoch: int) -> None:
    assert len(set(shuffle(n, seed, epoch))) == n


@settings(deadline=None)
@given(n=st.integers(1, 2**60), data=st.data())
def test_a_part_is_the_same_alone_and_within_a_larger_one(n: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), dtype=np.int64)
    together = permute(index, n, 1, 2)
    assert ((together >= 0) & (together < n)).all()
    assert together.tolist() == [int(permute(index[i : i + 1], n, 1, 2)[0]) for i in range(len(index))]


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {tuple(shuffle(100, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_seed_and_epoch_are_not_interchangeable() -> None:
    assert shuffle(100, seed=1, epoch=2) != shuffle(100, seed=2, epoch=1)
    assert shuffle(100, seed=1, epoch=0) != shuffle(100, seed=0, epoch=1)


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must continue in the order it started with."""
    assert shuffle(10, seed=42, epoch=0) == [4, 0, 6, 1, 5, 2, 7, 8, 3, 9]
    assert permute(np.array([0, 123_456_789]), 10**12, 42, 5).tolist() == [313506594215, 118759584103]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_shuffles_are_uniform_over_all_permutations(n: int) -> None:
    draws = 15 * len(list(permutations(range(n))))
    counts = dict.fromkeys(permutations(range(n)), 0)
    for seed in range(draws):
        counts[tuple(shuffle(n, seed))] += 1
    chi2 = sum((c - 15) ** 2 / 15 for c in counts.values())
    dof = len(counts) - 1
    assert chi2 < dof + 5 * (2 * dof) ** 0.5, counts


@pytest.mark.parametrize("n", [1000, 1024, 100_000])
def test_large_shuffles_look_random(n: int) -> None:
    x = np.array(shuffle(n, seed=3))
    index = np.arange(n)
    assert abs(np.corrcoef(index, x)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / n**0.5  # neighbours do not stay neighbours
    assert (x == index).sum() <= 8  # about one fixed point
    replicas = np.histogram2d(index, x, bins=10)[0]
    chi2 = ((replicas - n / 100) ** 2 / (n / 100)).sum()
    assert 81 - 5 * 162**0.5 < chi2 < 81 + 5 * 162**0.5


def test_each_position_gets_each_row_over_the_epochs() -> None:
    n, epochs = 16, 2000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), shuffle(n, seed=0, epoch=epoch)] += 1
    assert (abs(counts - epochs / n) < 6 * (epochs / n) ** 0.5).all()


def test_an_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match=r"0…5 are not all in range\(5\)"):
        permute(np.array([0, 5]), 5, 0, 0)


def test_no_indices_give_no_indices() -> None:
    assert permute(np.array([], dtype=np.int64), 5, 0, 0).tolist() == []
