"""Advantages of groups: numbers by hand, a reference in loops, and what must not change them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.advantages import group_advantages, mean_group_std, zero_std_fraction
from distflow.errors import ConfigError

Case = tuple[list[float], list[int]]

BUSY = settings(deadline=None)  # the first example waits for torch
SCORES = st.floats(-100, 100) | st.sampled_from([0.0, 0.1, 1.0])  # the latter so that equal scores are frequent
CASES = st.lists(st.tuples(SCORES, st.sampled_from([-7, 0, 3, 2**40])), max_size=16).map(
    lambda rows: ([s for s, _ in rows], [g for _, g in rows])
)


def advantages(case: Case, eps: float = 1e-6) -> np.ndarray:
    scores, groups = case
    return group_advantages(tensor(scores), ids(groups), eps=eps).numpy()


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def reference(case: Case, eps: float) -> list[float]:
    scores, groups = case
    out = []
    for score, group in zip(scores, groups, strict=True):
        mates = [s for s, g in zip(scores, groups, strict=True) if g == group]
        if len(set(mates)) == 1:
            out.append(0.0)
            continue
        mean = math.fsum(mates) / len(mates)
        variance = math.fsum((s - mean) ** 2 for s in mates) / (len(mates) - 1)
        out.append((score - mean) / (math.sqrt(variance) + eps))
    return out


def mates(case: Case, i: int) -> list[int]:
    return [k for k, g in enumerate(case[1]) if g == case[1][i]]


@BUSY
@given(CASES)
def test_against_the_mean_of_the_others(case: Case) -> None:
    """RLOO"""
    scores, groups = case
    got = group_advantages(tensor(scores), ids(groups), "none", "leave_one_out")
    for i, score in enumerate(scores):
        others = [scores[k] for k in mates(case, i) if k != i]
        want = score - math.fsum(others) / len(others) if others else 0.0
        assert float(got[i]) == pytest.approx(want, abs=1e-9)


@BUSY
@given(CASES, st.data())
def test_against_the_mean_weighted_by_length(case: Case, data: st.DataObject) -> None:
    """OPO"""
    scores, groups = case
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(scores), max_size=len(scores)))
    got = group_advantages(tensor(scores), ids(groups), "none", "length_weighted", ids(lengths))
    assert got.isfinite().all()
    for i, score in enumerate(scores):
        total = sum(lengths[k] for k in mates(case, i))
        if total:
            mean = math.fsum(scores[k] * lengths[k] for k in mates(case, i)) / total
            assert float(got[i]) == pytest.approx(score - mean, abs=1e-9)
    # Of one length, it is the plain mean.
    plain = group_advantages(tensor(scores), ids(groups), "none")
    assert torch.allclose(
        group_advantages(tensor(scores), ids(groups), "none", "length_weighted", ids([7] * len(scores))), plain
    )


@BUSY
@given(CASES)
def test_scales_of_a_whole_batch(case: Case) -> None:
    scores, groups = case
    plain = group_advantages(tensor(scores), ids(groups), "none").numpy()
    batch = group_advantages(tensor(scores), ids(groups), "batch", eps=1e-9).numpy()  # REINFORCE++
    spread = float(np.std(plain, ddof=1)) if len(plain) > 1 else 0.0
    np.testing.assert_allclose(batch, plain / (spread + 1e-9), rtol=1e-6, atol=1e-9)
    useful = sum(len({s for s, g in zip(scores, groups, strict=True) if g == group}) > 1 for group in set(groups))
    nonzero = group_advantages(tensor(scores), ids(groups), "nonzero_std").numpy()  # GPG
    np.testing.assert_allclose(nonzero, plain * len(set(groups)) / max(1, useful), rtol=1e-12, atol=1e-12)


def test_other_baselines_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([1, 1, 1, 2])
    assert group_advantages(scores, groups, "none", "leave_one_out").tolist() == [1, -0.5, -0.5, 0]
    lengths = torch.tensor([6, 1, 1, 3])
    assert group_advantages(scores, groups, "none", "length_weighted", lengths).tolist() == [0.25, -0.75, -0.75, 0]
    got = group_advantages(scores, groups, "nonzero_std")
    assert got.tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3, 0])  # one of two groups has different scores


def test_by_hand() -> None:
    # Group 5: 1 0 0 1, mean 1/2, variance (4 · 1/4) / 3. Group 2: 3 1, mean 2, variance 2. Group 9: alone.
    scores = torch.tensor([1.0, 3.0, 0.0, 0.0, 8.0, 1.0, 1.0])
    groups = torch.tensor([5, 2, 5, 5, 9, 2, 5])
    got = group_advantages(scores, groups, eps=1e-12)
    root = 3**0.5
    assert got.tolist() == pytest.approx([root / 2, 0.5**0.5, -root / 2, -root / 2, 0, -(0.5**0.5), root / 2])
    assert group_advantages(scores, groups, scale="none").tolist() == [0.5, 1, -0.5, -0.5, 0, -1, 0.5]
    got = group_advantages(scores, groups, eps=1.0)  # eps is added to the standard deviation
    assert got[:2].tolist() == pytest.approx([0.5 / (1 + 1 / root), 1 / (1 + 2**0.5)])


@BUSY
@given(CASES, st.sampled_from([1e-6, 1e-2, 1.0]))
def test_matches_the_reference(case: Case, eps: float) -> None:
    np.testing.assert_allclose(advantages(case, eps), reference(case, eps), rtol=1e-7, atol=1e-7)


@BUSY
@given(CASES, st.sampled_from([-1000.0, -0.3, 0.7, 64.0]))
def test_adding_a_constant_changes_nothing(case: Case, shift: float) -> None:
    moved = [s + shift for s in case[0]]
    # Rounding the sums can merge scores that were apart, by less than this; eps keeps that small.
    np.testing.assert_allclose(advantages((moved, case[1]), 1e-3), advantages(case, 1e-3), atol=1e-8)


@BUSY
@given(CASES, st.sampled_from([0.001, 0.5, 3.0, 1e4]))
def test_scaling_changes_nothing_and_a_sign_only_the_sign(case: Case, factor: float) -> None:
    want = advantages(case, 1e-3)
    scaled = [s * factor for s in case[0]]
    np.testing.assert_allclose(advantages((scaled, case[1]), 1e-3 * factor), want, atol=1e-8)
    np.testing.assert_allclose(advantages(([-s for s in case[0]], case[1]), 1e-3), -want, atol=1e-8)


@BUSY
@given(CASES, st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(case: Case, random) -> None:
    want = advantages(case)
    order = list(range(len(want)))
    random.shuffle(order)
    names = dict(zip(sorted(set(case[1])), random.sample(range(-50, 50), len(set(case[1]))), strict=True))
    mixed = [case[0][i] for i in order], [names[case[1][i]] for i in order]
    np.testing.assert_allclose(advantages(mixed), want[order], rtol=1e-9, atol=1e-9)


@BUSY
@given(CASES)
def test_a_group_does_not_see_the_others(case: Case) -> None:
    whole = advantages(case)
    for g in set(case[1]):
        mine = [i for i, other in enumerate(case[1]) if other == g]
        alone = advantages(([case[0][i] for i in mine], [g] * len(mine)))
        np.testing.assert_allclose(whole[mine], alone, rtol=1e-9, atol=1e-9)


@BUSY
@given(CASES)
def test_a_group_has_mean_0_and_deviation_1_or_none(case: Case) -> None:
    got = advantages(case, 1e-9)
    for g in set(case[1]):
        mine = [i for i, other in enumerate(case[1]) if other == g]
        assert abs(got[mine].mean()) < 1e-9
        spread = np.ptp([case[0][i] for i in mine])
        if spread > 1e-3:
            assert got[mine].std(ddof=1) == pytest.approx(1, abs=1e-4)
        if spread == 0:
            assert (got[mine] == 0).all()


@BUSY
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 12), st.sampled_from(["std", "none"]))
def test_equal_scores_give_exactly_0(score: float, n: int, scale) -> None:
    for dtype in (torch.float32, torch.float64):
        got = group_advantages(torch.full((n,), score, dtype=dtype), torch.zeros(n, dtype=torch.int64), scale)
        assert got.tolist() == [0.0] * n
    got = group_advantages(tensor([0.1] * n), torch.zeros(n, dtype=torch.int64), scale)  # 3 · 0.1 / 3 is not 0.1
    assert got.tolist() == [0.0] * n


@BUSY
@given(CASES)
def test_a_group_of_one_gets_0(case: Case) -> None:
    n = len(case[0])
    assert advantages((case[0], list(range(n)))).tolist() == [0.0] * n


def test_dtypes() -> None:
    groups = torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert group_advantages(torch.tensor([0, 1], dtype=dtype), groups).dtype == dtype
    got = group_advantages(torch.tensor([0, 1]), groups)  # whole numbers have fractions as advantages
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    scores = torch.arange(300).sqrt()
    for dtype in (torch.bfloat16, torch.float32):  # only the result is rounded
        narrow = scores.to(dtype)
        exact = group_advantages(narrow.double(), groups.new_zeros(300))
        assert torch.equal(group_advantages(narrow, groups.new_zeros(300)), exact.to(dtype))
    # The mean, 2^24 + 2/3, is not a float32; a mean in float32 would be off by a third.
    got = group_advantages(torch.tensor([0.0, 0.0, 2.0]) + 2.0**24, groups.new_zeros(3), scale="none")
    assert got.tolist() == pytest.approx([-2 / 3, -2 / 3, 4 / 3])


def test_no_samples() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert zero_std_fraction(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == 0


def test_a_baseline_without_its_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the lengths"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), baseline="length_weighted")
    with pytest.raises(
        ConfigError, match="unknown baseline of advantages 'leave_one_ot'; did you mean 'leave_one_out'"
    ):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), baseline="leave_one_ot")  # type: ignore[arg-type]


def test_fraction_of_groups_with_equal_scores() -> None:
    scores = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 2.0, 5.0, 5.0])
    groups = torch.tensor([8, 4, 8, 4, 8, 1, -2, -2])
    assert zero_std_fraction(scores, groups) == 0.75  # all but group 4; group 1 has one sample


def test_mean_standard_deviation_of_groups() -> None:
    scores = torch.tensor([1.0, 3.0, 0.1, 0.1, 0.1, 7.0])
    groups = torch.tensor([8, 8, 4, 4, 4, 1])
    assert mean_group_std(scores, groups) == pytest.approx(2**0.5 / 3)  # √2, 0, and of one there is none
    assert mean_group_std(scores[:0], groups[:0]) == 0


@BUSY
@given(CASES.filter(lambda c: len(c[0]) > 0))
def test_the_fraction_counts_groups_without_advantage(case: Case) -> None:
    got = advantages(case)
    without = [all(got[i] == 0 for i, g in enumerate(case[1]) if g == name) for name in set(case[1])]
    assert zero_std_fraction(tensor(case[0]), ids(case[1])) == pytest.approx(sum(without) / len(without))


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="scale of advantages 'sdt'; did you mean 'std'"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), scale="sdt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eps of advantages is 0"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), eps=0.0)
