"""Baselines of tokens and of roles: loops over samples and tokens in plain Python give the same."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.baselines import optimal_token_advantages, role_advantages
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None, max_examples=100)
VALUE = st.floats(-3, 3)
ENERGY = st.one_of(st.just(0.0), st.floats(1e-3, 2))
SAMPLES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.tuples(VALUE, ENERGY), max_size=5)), max_size=7)


@BUSY
@given(SAMPLES)
def test_the_optimal_token_baseline_matches_the_reference(samples: list[tuple[int, list[tuple[float, float]]]]) -> None:
    want = []
    for group, tokens in samples:
        for t, (value, _) in enumerate(tokens):
            peers = [other for g, other in samples if g == group and len(other) > t]
            weights = [math.fsum(energy for _, energy in other[: t + 1]) for other in peers]
            if not any(weights):
                weights = [1.0] * len(peers)
            baseline = math.fsum(w * other[t][0] for w, other in zip(weights, peers, strict=True)) / math.fsum(weights)
            want.append(value - baseline)
    flat = torch.tensor([pair for _, tokens in samples for pair in tokens], dtype=torch.float64).reshape(-1, 2)
    lengths = torch.tensor([len(tokens) for _, tokens in samples], dtype=torch.int64)
    groups = torch.tensor([group for group, _ in samples], dtype=torch.int64)
    got = optimal_token_advantages(flat[:, 0], flat[:, 1], lengths, groups)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)


def test_equal_returns_have_no_advantage() -> None:
    returns, lengths = torch.full((7,), 0.1), torch.tensor([2, 3, 2])
    got = optimal_token_advantages(returns, torch.rand(7), lengths, torch.tensor([5, 5, 1]))
    assert got.tolist() == [0.0] * 7
    assert got.dtype == torch.float32
    with pytest.raises(DataError, match=r"energy \[3\] are not one per token of 7"):
        optimal_token_advantages(returns, torch.zeros(3), lengths, torch.tensor([5, 5, 1]))


def test_a_certain_token_does_not_move_the_baseline() -> None:
    """Of two responses, the one about which the policy was certain has no gradient, and so no part in the baseline."""
    got = optimal_token_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5]), torch.tensor([1, 1]), _SAME)
    assert got.tolist() == [1.0, 0.0]


_SAME = torch.zeros(2, dtype=torch.int64)


@BUSY
@given(st.lists(st.tuples(st.sampled_from("ab"), VALUE), max_size=8), st.floats(0, 0.99))
def test_the_baselines_of_roles_match_the_reference(scored: list[tuple[str, float]], decay: float) -> None:
    start = {"a": 0.25}
    want = [score - start.get(role, 0.0) for role, score in scored]
    moved = {
        # The closed form of the moving average.
        role: decay ** len(own) * start.get(role, 0.0)
        + math.fsum((1 - decay) * decay ** (len(own) - 1 - i) * score for i, score in enumerate(own))
        for role in {"a", *(r for r, _ in scored)}
        for own in [[score for r, score in scored if r == role]]
    }
    scores = torch.tensor([score for _, score in scored], dtype=torch.float64)
    got, after = role_advantages(scores, [role for role, _ in scored], start, decay)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-12)
    assert after == pytest.approx(moved)
    assert start == {"a": 0.25}


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay of the baselines is 1\.0"):
        role_advantages(torch.zeros(1), ["a"], {}, 1.0)
    with pytest.raises(DataError, match="1 scores and 2 roles"):
        role_advantages(torch.zeros(1), ["a", "b"], {}, 0.5)
