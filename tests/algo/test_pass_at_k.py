from itertools import combinations
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.algo.pass_at_k import pass_at_k, reported_ks


@given(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(-5, 5), min_size=1, max_size=8), st.data())
def test_it_is_the_mean_over_all_choices(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    want = mean(max(chosen) for chosen in combinations(scores, k))
    assert pass_at_k(scores, k) == pytest.approx(want, abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k([0, 1, 0, 0], 1) == 0.25
    assert pass_at_k([0, 1, 0, 0], 2) == 0.5
    assert pass_at_k([0, 1, 0, 0], 4) == 1
    assert pass_at_k([1.0] + [0.0] * 9999, 5000) == pytest.approx(0.5)  # more choices than a float can count


def test_which_k_are_reported() -> None:
    assert [reported_ks(n) for n in (1, 2, 3, 4, 8, 12)] == [[], [2], [2, 3], [2, 4], [2, 4, 8], [2, 4, 8, 12]]
