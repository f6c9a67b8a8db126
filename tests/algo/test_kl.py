"""Estimators of KL: numbers by hand, the true KL of small distributions, and no overflow."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.kl import kl
from distflow.algo.options import Estimator
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        ("k1", [0.5, -1.0, 0.0, 2.0]),
        ("k2", [0.125, 0.5, 0.0, 2.0]),
        ("k3", [0.10653066, 0.71828183, 0.0, 1.13533528]),  # e^−½ − ½, e − 2, 0, e^−2 + 1
        ("k3+", [0.10653066, 0.71828183, 0.0, 1.13533528]),
    ],
)
def test_by_hand(estimator: Estimator, want: list[float]) -> None:
    logprobs, ref = torch.tensor([-1.0, -3.0, -0.7, -0.5]), torch.tensor([-1.5, -2.0, -0.7, -2.5])
    torch.testing.assert_close(kl(estimator, logprobs, ref), torch.tensor(want))


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        ("k1", [1.0, 1.0, 1.0]),
        ("k2", [0.5, -1.0, 0.0]),
        ("k3", [0.39346934, -1.71828183, 0.0]),  # 1 − e^−x
        ("k3+", [0.5, -1.0, 0.0]),  # of k2
    ],
)
def test_gradient_by_hand(estimator: Estimator, want: list[float]) -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.7], requires_grad=True)
    kl(estimator, logprobs, torch.tensor([-1.5, -2.0, -0.7])).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(want))


# Of two distributions no ratio is above 16: beyond 21 k3 goes on as a line, and is biased.
WEIGHTS = st.lists(st.tuples(st.floats(0.25, 1), st.floats(0.25, 1)), min_size=2, max_size=8)


@BUSY
@given(WEIGHTS)
def test_k1_and_k3_are_unbiased(weights: list[tuple[float, float]]) -> None:
    policy, ref = (np.array(w) / sum(w) for w in zip(*weights, strict=True))
    true = sum(p * np.log(p / r) for p, r in zip(policy, ref, strict=True))
    for estimator in ("k1", "k3"):
        got = kl(estimator, torch.from_numpy(np.log(policy)), torch.from_numpy(np.log(ref)))
        assert float((torch.from_numpy(policy) * got).sum()) == pytest.approx(true, abs=1e-12)


@BUSY
@given(st.floats(-19, 300), st.sampled_from([torch.float32, torch.float64]))
def test_k2_and_k3_are_not_negative(x: float, dtype: torch.dtype) -> None:
    zero = torch.zeros(1, dtype=dtype)
    assert kl("k2", zero + x, zero) >= 0
    assert kl("k3", zero + x, zero) >= -1e-12


def test_k3_is_precise_where_policies_are_close() -> None:
    x = torch.tensor([1e-3, -1e-3, 1e-2])
    torch.testing.assert_close(kl("k3", x, torch.zeros(3)), x**2 / 2 - x**3 / 6, rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("x", [-1e4, -100.0, -20.1, 20.0, 100.0, 1e4])
def test_huge_differences_stay_finite(estimator: Estimator, x: float) -> None:
    logprobs = torch.tensor([x], requires_grad=True)
    got = kl(estimator, logprobs, torch.zeros(1))
    got.sum().backward()
    assert logprobs.grad is not None
    assert got.isfinite().all()
    assert logprobs.grad.isfinite().all()


@BUSY
@given(st.floats(-1000, 1000))
def test_k3_never_pushes_away_from_the_reference(x: float) -> None:
    logprobs = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    kl("k3", logprobs, torch.zeros(1)).sum().backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) * x >= 0


@BUSY
@given(st.floats(-60, 60))
def test_k3_has_the_tangent_as_its_tail(x: float) -> None:
    """e^−x − 1 + x up to a slope of 20, at a ratio of 21; from there on a line, which always pulls back."""
    logprobs = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    got = kl("k3", logprobs, torch.zeros(1, dtype=torch.float64))
    got.sum().backward()
    far = max(0.0, -x - math.log(21))
    inner = max(x, -math.log(21))
    assert float(got.detach()) == pytest.approx(math.exp(-inner) - 1 + inner + 20 * far, rel=1e-9, abs=1e-12)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(max(1 - math.exp(-x), -20), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_minus_infinity_on_both_sides_is_agreement(estimator: Estimator) -> None:
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    got = kl(estimator, logprobs, torch.tensor([-math.inf, -1.0]))
    got.sum().backward()
    assert got.tolist() == [0, 0]
    assert logprobs.grad is not None
    assert logprobs.grad[0] == 0


def test_k3_pulls_back_from_what_the_reference_rules_out() -> None:
    logprobs = torch.tensor([-1.0, -math.inf], requires_grad=True)
    kl("k3", logprobs, torch.tensor([-math.inf, -1.0])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1, -20]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4'; known: k1, k2, k3"):
        kl("k4", torch.zeros(1), torch.zeros(1))  # type: ignore[arg-type]
