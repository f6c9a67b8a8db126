"""Controllers: by hand, where they move a weight and where they come to rest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.algo.kl_control import adaptive_kl_weight, lagrangian_kl_weight
from distflow.errors import ConfigError, DataError

POSITIVE = st.floats(1e-3, 1e3)


def test_by_hand() -> None:
    assert adaptive_kl_weight(0.2, 6.6, 6.0, horizon=10000, samples=512) == pytest.approx(0.2 * (1 + 0.1 * 0.0512))
    assert adaptive_kl_weight(0.2, 60.0, 6.0, horizon=100, samples=100) == pytest.approx(0.24)  # no more than 20 %
    assert adaptive_kl_weight(0.2, 0.0, 6.0, horizon=100, samples=100) == pytest.approx(0.16)
    assert adaptive_kl_weight(0.2, -3.0, 6.0, horizon=100, samples=100) == pytest.approx(
        0.16
    )  # an estimate can be below 0
    assert lagrangian_kl_weight(0.2, 9.0, 6.0, rate=0.1) == pytest.approx(0.2 * math.exp(0.05))
    assert lagrangian_kl_weight(0.2, 0.0, 6.0, rate=0.1) == pytest.approx(0.2 * math.exp(-0.1))


@given(POSITIVE, st.floats(-1e3, 1e3), POSITIVE, st.floats(0, 10), st.integers(0, 4000))
def test_the_weight_goes_where_it_should_and_stays_above_0(
    weight: float, kl: float, target: float, rate: float, samples: int
) -> None:
    for new in (adaptive_kl_weight(weight, kl, target, 1000, samples), lagrangian_kl_weight(weight, kl, target, rate)):
        assert 0 < new < math.inf
        assert new >= weight if kl > target else new <= weight
    assert (
        adaptive_kl_weight(weight, target, target, 1000, samples)
        == weight
        == lagrangian_kl_weight(weight, target, target, rate)
    )


def test_they_find_the_weight_that_holds_the_target() -> None:
    adaptive = dual = 5.0
    for _ in range(500):  # where the divergence is 1 / weight
        adaptive, dual = (
            adaptive_kl_weight(adaptive, 1 / adaptive, 0.5, 100, 20),
            lagrangian_kl_weight(dual, 1 / dual, 0.5, 0.1),
        )
    assert (adaptive, dual) == pytest.approx((2, 2), rel=1e-6)


def test_invalid_arguments_are_refused() -> None:
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"weight = .*; it must be above 0"):
            adaptive_kl_weight(bad, 1, 1, 10, 1)
        with pytest.raises(ConfigError, match=r"target = .*; it must be above 0"):
            lagrangian_kl_weight(1, 1, bad, 0.1)
    for horizon in (0.0, 100.0):
        with pytest.raises(ConfigError, match=r"with 500 samples a step; it must be above 100"):
            adaptive_kl_weight(1, 1, 1, horizon, 500)
    with pytest.raises(ConfigError, match="-1 samples"):
        adaptive_kl_weight(1, 1, 1, 10, -1)
    with pytest.raises(ConfigError, match=r"rate = -0\.1"):
        lagrangian_kl_weight(1, 1, 1, -0.1)
    for kl in (math.nan, math.inf):
        with pytest.raises(DataError, match=f"divergence of the step is {kl}"):
            adaptive_kl_weight(1, kl, 1, 10, 1)
        with pytest.raises(DataError, match=f"divergence of the step is {kl}"):
            lagrangian_kl_weight(1, kl, 1, 0.1)
