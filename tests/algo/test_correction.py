"""Rollout correction: numbers by hand, a reference in loops, weights that are always finite."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.correction import Correction
from distflow.algo.options import CorrectionKind
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None)  # the first example waits for torch
KINDS: tuple[CorrectionKind, ...] = get_args(CorrectionKind)
Dataset = list[list[tuple[float, float]]]  # of each token: the trainer's, the engine's


def rows(values: st.SearchStrategy[float]) -> st.SearchStrategy[Dataset]:
    return st.lists(st.lists(st.tuples(values, values), max_size=5), max_size=5)


def run(
    kind: CorrectionKind,
    case: Dataset,
    threshold: float = 2.0,
    lower: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    ours, theirs = (torch.tensor([pair[k] for row in case for pair in row], dtype=dtype) for k in (0, 1))
    lengths = torch.tensor([len(r) for r in case], dtype=torch.int64)
    weights, metrics = Correction(kind, threshold, lower).weights(ours, theirs, lengths)
    assert set(metrics) == {"rollout/correction", "rollout/corrected_frac"}
    assert torch.equal(metrics["rollout/correction"], weights)
    return weights, metrics["rollout/corrected_frac"]


def log_ratios(kind: CorrectionKind, case: Dataset) -> list[float]:
    """The log-ratio of each token, or of its response."""
    out = []
    for row in case:
        differences = [a - b for a, b in row]
        total = math.fsum(differences)
        whole = {"sequence": total, "icepop-sequence": total, "mask-sequence": total / max(1, len(row))}
        out += [whole.get(kind, x) for x in differences]
    return out


def by_formula(kind: CorrectionKind, log_ratio: float, threshold: float, lower: float | None) -> tuple[float, bool]:
    """The weight of a token, and whether its ratio is outside the bounds."""
    ratio = math.exp(log_ratio)
    if lower is None:
        lower = 0.0 if kind in ("token", "sequence") else 1 / threshold
    outside = not lower <= ratio <= threshold
    if kind in ("token", "sequence"):
        return min(max(ratio, lower, math.exp(-20)), threshold), outside
    inside = 1.0 if kind.startswith("mask") else ratio
    return 0.0 if outside else inside, outside


@pytest.mark.parametrize(
    ("kind", "weights", "corrected"),
    [
        ("token", [2, 0.25, 1, 1.5], [1, 0, 0, 0]),
        ("sequence", [1, 1, 1, 1.5], [0, 0, 0, 0]),
        ("mask-token", [0, 0, 1, 1], [1, 1, 0, 0]),
        ("mask-sequence", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("icepop-token", [0, 0, 1, 1.5], [1, 1, 0, 0]),
        ("icepop-sequence", [1, 1, 1, 1.5], [0, 0, 0, 0]),
    ],
)
def test_by_hand(kind: CorrectionKind, weights: list[float], corrected: list[float]) -> None:
    ratios = torch.tensor([4, 0.25, 1, 1.5], dtype=torch.float64)
    got, metrics = Correction(kind).weights(ratios.log(), torch.zeros(4, dtype=torch.float64), torch.tensor([0, 3, 1]))
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


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token", [3, 0.5, 1]),
        ("mask-token", [0, 0, 1]),
        ("icepop-token", [0, 0, 1]),
        ("sequence", [0.8, 0.8, 0.8]),
        ("mask-sequence", [1, 1, 1]),
        ("icepop-sequence", [0.8, 0.8, 0.8]),
    ],
)
def test_a_lower_bound(kind: CorrectionKind, weights: list[float]) -> None:
    case = [[(math.log(4), 0.0), (math.log(0.2), 0.0), (0.0, 0.0)]]
    assert run(kind, case, 3.0, 0.5)[0].tolist() == pytest.approx(weights)
    low = [[(math.log(0.1), 0.0)]]
    assert run(kind, low, 3.0, 0.5)[0].tolist() == [0.5 if kind in ("token", "sequence") else 0]
    inside = {"mask-token": 1, "mask-sequence": 1}.get(kind, 0.1)
    assert run(kind, low, 3.0, 0.0)[0].tolist() == pytest.approx([inside])  # 0 is no bound
    assert run(kind, low, 3.0, 0.0)[1].tolist() == [0]


@BUSY
@given(
    rows(st.floats(-6, 0)),
    st.sampled_from(KINDS),
    st.sampled_from([1.0, 1.5, 2.0, 10.0]),
    st.sampled_from([None, 0.0, 0.3, 1.0]),
)
def test_matches_the_reference(case: Dataset, kind: CorrectionKind, threshold: float, lower: float | None) -> None:
    logs = log_ratios(kind, case)
    bounds = [math.log(b) for b in (threshold, 1 / threshold, lower) if b]
    assume(all(abs(x - bound) > 1e-9 or x == 0 for x in logs for bound in bounds))  # either is right at the bound
    weights, corrected = run(kind, case, threshold, lower)
    want = [by_formula(kind, x, threshold, lower) for x in logs]
    np.testing.assert_allclose(weights.numpy(), [w for w, _ in want], rtol=1e-9)
    assert corrected.tolist() == [outside for _, outside in want]


@BUSY
@given(
    rows(st.floats(-1e5, 0) | st.just(-math.inf)),
    st.sampled_from(KINDS),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.sampled_from([None, 0.0, 1.0]),
)
def test_agreement_is_exactly_1(case: Dataset, kind: CorrectionKind, threshold: float, lower: float | None) -> None:
    same = [[(a, a) for a, _ in row] for row in case]
    for dtype in (torch.float32, torch.float64):
        weights, corrected = run(kind, same, threshold, lower, dtype)
        assert (weights == 1).all()
        assert (corrected == 0).all()


@BUSY
@given(rows(st.floats(-(2.0**120), 2.0**120, width=32) | st.sampled_from([-math.inf, 0.0])), st.sampled_from(KINDS))
def test_always_finite(case: Dataset, kind: CorrectionKind) -> None:
    for dtype in (torch.float32, torch.float64):
        for threshold in (2.0, math.inf):
            weights, corrected = run(kind, case, threshold, dtype=dtype)
            assert weights.dtype == corrected.dtype == dtype
            assert weights.isfinite().all()
            assert ((weights >= 0) & (weights <= threshold)).all()


@BUSY
@given(rows(st.floats(-6, 0)), st.sampled_from(KINDS))
def test_a_response_does_not_see_the_others(case: Dataset, kind: CorrectionKind) -> None:
    alone = [run(kind, [row])[0].tolist() for row in case]
    assert run(kind, case)[0].tolist() == [x for part in alone for x in part]


def test_no_gradient_passes() -> None:
    ours = torch.zeros(2, requires_grad=True)
    for kind in KINDS:
        weights, metrics = Correction(kind).weights(ours, torch.ones(2), torch.tensor([2]))
        assert not weights.requires_grad
        assert not any(values.requires_grad for values in metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind: CorrectionKind) -> None:
    assert run(kind, [])[0].shape == (0,)
    assert run(kind, [[], []])[0].shape == (0,)


def test_invalid_arguments_are_refused() -> None:
    zeros, two = torch.zeros(2), torch.tensor([2])
    with pytest.raises(ConfigError, match="unknown rollout correction 'tokens'; did you mean 'token'"):
        Correction("tokens")  # type: ignore[arg-type]
    for threshold in (0.5, math.nan):
        with pytest.raises(ConfigError, match="must be 1 or more"):
            Correction("token", threshold)
    for lower in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="it must be within 0 … 1"):
            Correction("icepop-token", 2.0, lower)
    with pytest.raises(DataError, match="'rollout_logprobs' is"):
        Correction("token").weights(zeros, torch.zeros(1), two)
