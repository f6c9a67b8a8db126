"""Rollout correction: numbers by hand, a reference in loops, weights that are always finite."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.correction import Kind, correction
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None)  # the first example waits for torch
KINDS: tuple[Kind, ...] = get_args(Kind)
Dataset = list[list[tuple[float, float]]]  # of each token: the trainer's, the engine's


def rows(values: st.SearchStrategy[float]) -> st.SearchStrategy[Dataset]:
    return st.lists(st.lists(st.tuples(values, values), max_size=5), max_size=5)


def run(kind: Kind, case: Dataset, threshold: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    ours, theirs = (torch.tensor([pair[k] for row in case for pair in row], dtype=dtype) for k in (0, 1))
    weights, metrics = correction(
        kind, ours, theirs, torch.tensor([len(r) for r in case], dtype=torch.int64), threshold
    )
    assert set(metrics) == {"rollout/correction", "rollout/corrected_frac"}
    assert torch.equal(metrics["rollout/correction"], weights)
    return weights, metrics["rollout/corrected_frac"]


def log_ratios(kind: Kind, case: Dataset) -> list[float]:
    """The log-ratio of each token, or of its response."""
    out = []
    for row in case:
        differences = [a - b for a, b in row]
        whole = {"sequence": math.fsum(differences), "mask-sequence": math.fsum(differences) / max(1, len(row))}
        out += [whole.get(kind, x) for x in differences]
    return out


@pytest.mark.parametrize(
    ("kind", "weights", "corrected"),
    [
        ("token", [2, 0.25, 1, 1.5], [1, 0, 0, 0]),
        ("sequence", [1, 1, 1, 1.5], [0, 0, 0, 0]),
        ("mask-token", [0, 0, 1, 1], [1, 1, 0, 0]),
        ("mask-sequence", [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_by_hand(kind: Kind, weights: list[float], corrected: list[float]) -> None:
    ratios = torch.tensor([4, 0.25, 1, 1.5], dtype=torch.float64)
    got, metrics = correction(kind, ratios.log(), torch.zeros(4, dtype=torch.float64), torch.tensor([0, 3, 1]))
    assert got.tolist() == pytest.approx(weights)
    assert metrics["rollout/corrected_frac"].tolist() == corrected


def test_a_whole_response_by_hand() -> None:
    case = [[(0.5, 0.0), (0.5, 0.0)], [(1.0, 0.0), (0.5, 0.0)], [(0.0, 3.0)]]
    weights, corrected = run("sequence", case)
    assert weights.tolist() == pytest.approx([2, 2, 2, 2, math.exp(-3)])  # products e and e^1.5 are truncated
    assert corrected.tolist() == [1, 1, 1, 1, 0]
    weights, corrected = run("mask-sequence", case)
    assert weights.tolist() == [1, 1, 0, 0, 0]  # means 0.5, 0.75 and −3, the bound is 0.69
    assert corrected.tolist() == [0, 0, 1, 1, 1]


@BUSY
@given(rows(st.floats(-6, 0)), st.sampled_from(KINDS), st.sampled_from([1.0, 1.5, 2.0, 10.0]))
def test_matches_the_reference(case: Dataset, kind: Kind, threshold: float) -> None:
    logs = log_ratios(kind, case)
    bound = math.log(threshold)
    assume(all(abs(abs(x) - bound) > 1e-9 or x == 0 for x in logs))  # either is right at the bound
    weights, corrected = run(kind, case, threshold)
    if kind.startswith("mask"):
        assert weights.tolist() == [float(abs(x) <= bound) for x in logs]
        assert corrected.tolist() == [float(abs(x) > bound) for x in logs]
    else:
        np.testing.assert_allclose(weights.numpy(), [min(math.exp(max(x, -20)), threshold) for x in logs], rtol=1e-9)
        assert corrected.tolist() == [float(x > bound) for x in logs]


@BUSY
@given(rows(st.floats(-1e5, 0)), st.sampled_from(KINDS), st.sampled_from([1.0, 2.0, math.inf]))
def test_agreement_is_exactly_1(case: Dataset, kind: Kind, threshold: float) -> None:
    same = [[(a, a) for a, _ in row] for row in case]
    for dtype in (torch.float32, torch.float64):
        weights, corrected = run(kind, same, threshold, dtype)
        assert (weights == 1).all()
        assert (corrected == 0).all()


@BUSY
@given(rows(st.floats(-(2.0**120), 2.0**120, width=32) | st.sampled_from([-math.inf, 0.0])), st.sampled_from(KINDS))
def test_always_finite(case: Dataset, kind: Kind) -> None:
    for dtype in (torch.float32, torch.float64):
        for threshold in (2.0, math.inf):
            weights, corrected = run(kind, case, threshold, dtype)
            assert weights.dtype == corrected.dtype == dtype
            assert weights.isfinite().all()
            assert ((weights >= 0) & (weights <= threshold)).all()


@BUSY
@given(rows(st.floats(-6, 0)), st.sampled_from(KINDS))
def test_a_response_does_not_see_the_others(case: Dataset, kind: Kind) -> None:
    alone = [run(kind, [row])[0].tolist() for row in case]
    assert run(kind, case)[0].tolist() == [x for part in alone for x in part]


def test_no_gradient_passes() -> None:
    ours = torch.zeros(2, requires_grad=True)
    for kind in KINDS:
        weights, metrics = correction(kind, ours, torch.ones(2), torch.tensor([2]))
        assert not weights.requires_grad
        assert not any(values.requires_grad for values in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: Kind) -> None:
    assert run(kind, [])[0].shape == (0,)
    assert run(kind, [[], []])[0].shape == (0,)


def test_invalid_arguments_are_refused() -> None:
    zeros, two = torch.zeros(2), torch.tensor([2])
    with pytest.raises(ConfigError, match="unknown rollout correction 'tokens'; did you mean 'token'"):
        correction("tokens", zeros, zeros, two)  # type: ignore[arg-type]
    for threshold in (0.5, math.nan):
        with pytest.raises(ConfigError, match="must be 1 or more"):
            correction("token", zeros, zeros, two, threshold)
    with pytest.raises(DataError, match="'rollout_logprobs' is"):
        correction("token", zeros, torch.zeros(1), two)
