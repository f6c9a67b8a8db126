"""The learning rate: up, then as the schedule says, by the number of the update alone."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.config.schema import TrainConfig
from distflow.train.lr_schedule import learning_rate

KINDS = st.sampled_from(["constant", "linear", "cosine"])


def rates(kind: str, warmup: int, total: int, lr: float = 1.0) -> list[float]:
    config = TrainConfig.model_validate({"lr": lr, "warmup": warmup, "schedule": kind})
    return [learning_rate(config, update, total) for update in range(total)]


def test_the_three_schedules() -> None:
    assert rates("constant", 0, 4) == [1, 1, 1, 1]
    assert rates("linear", 0, 4) == [1, 0.75, 0.5, 0.25]
    assert rates("cosine", 0, 4) == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates("linear", 2, 6) == [0.5, 1, 1, 0.75, 0.5, 0.25]


@settings(deadline=None)
@given(KINDS, st.integers(0, 30), st.integers(1, 60), st.floats(1e-7, 1))
def test_it_rises_and_then_never_again(kind: str, warmup: int, total: int, lr: float) -> None:
    got = rates(kind, warmup, total, lr)
    up, down = got[:warmup], got[warmup:]
    assert all(a < b for a, b in pairwise(up))
    assert all(a >= b for a, b in pairwise(down))
    assert all(0 < x <= lr * (1 + 1e-12) for x in got)  # the first and the last update change something too
    if warmup < total:
        assert down[0] == lr


@settings(deadline=None)
@given(KINDS, st.integers(0, 5), st.integers(1, 10), st.integers(0, 50))
def test_beyond_the_end_it_stays_where_it_came_to(kind: str, warmup: int, more: int, beyond: int) -> None:
    config = TrainConfig.model_validate({"lr": 1.0, "warmup": warmup, "schedule": kind})
    total = warmup + more
    assert learning_rate(config, total + beyond, total) == (1 if kind == "constant" else 0)
