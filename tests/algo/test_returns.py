"""Returns of packed responses and whitening in parts: numbers by hand, a reference in loops, any split the same."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.returns import (
    discounted_returns,
    explained_variance,
    gae,
    merge_moments,
    moments,
    token_rewards,
    whiten,
)
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None)  # the first example waits for torch
Dataset = list[list[float]]
FLOATS = st.floats(-10, 10) | st.sampled_from([0.0, 0.1, 1.0])
ROWS = st.lists(st.lists(FLOATS, max_size=9), max_size=6)
PAIRS = st.lists(st.lists(st.tuples(FLOATS, FLOATS), max_size=9), max_size=6).map(
    lambda rows: ([[a for a, _ in row] for row in rows], [[b for _, b in row] for row in rows])
)
SHARES = st.floats(0, 1) | st.sampled_from([0.0, 0.95, 1.0])


def flat(rows: Dataset) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def sizes(rows: Dataset) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def by_gae(rewards: Dataset, values: Dataset, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for r, v in zip(rewards, values, strict=True):
        for t in range(len(r)):
            deltas = [r[s] + gamma * (v[s + 1] if s + 1 < len(v) else 0.0) - v[s] for s in range(t, len(r))]
            advantages.append(math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas)))
            returns.append(advantages[-1] + v[t])
    return advantages, returns


def test_gae_by_hand() -> None:
    # Deltas with γ = 1/2: 0 + 1 − 1, 4 + 0 − 2; then 1 − 3. A with γλ = 1/4.
    rewards, values = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([1.0, 2.0, 3.0])
    advantages, returns = gae(rewards, values, torch.tensor([0, 2, 0, 1]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0.5, 2, -2]
    assert returns.tolist() == [1.5, 4, 1]


@BUSY
@given(PAIRS, SHARES, SHARES)
def test_gae_matches_the_reference(pair: tuple[Dataset, Dataset], gamma: float, lam: float) -> None:
    rewards, values = pair
    got = gae(flat(rewards), flat(values), sizes(rewards), gamma, lam)
    for mine, want in zip(got, by_gae(rewards, values, gamma, lam), strict=True):
        np.testing.assert_allclose(mine.numpy(), want, rtol=1e-9, atol=1e-9)


@BUSY
@given(PAIRS)
def test_ends_of_lambda(pair: tuple[Dataset, Dataset]) -> None:
    """With λ = 1 the return is what comes, with λ = 0 the advantage is one step's surprise."""
    rewards, values = pair
    _, returns = gae(flat(rewards), flat(values), sizes(rewards), 1.0, 1.0)
    to_come = [math.fsum(row[t:]) for row in rewards for t in range(len(row))]
    np.testing.assert_allclose(returns.numpy(), to_come, atol=1e-9)
    perfect = [[math.fsum(row[t:]) for t in range(len(row))] for row in rewards]
    advantages, _ = gae(flat(rewards), flat(perfect), sizes(rewards), 1.0, 0.3)
    np.testing.assert_allclose(advantages.numpy(), 0, atol=1e-9)  # a critic that knows is never surprised


@BUSY
@given(ROWS, SHARES)
def test_discounted_returns_matches_the_reference(rewards: Dataset, gamma: float) -> None:
    got = discounted_returns(flat(rewards), sizes(rewards), gamma)
    want = [math.fsum(gamma**k * r for k, r in enumerate(row[t:])) for row in rewards for t in range(len(row))]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)
    nothing = flat(rewards) * 0
    same, _ = gae(flat(rewards), nothing, sizes(rewards), gamma, 1.0)
    assert torch.equal(got, same)


def test_a_long_response() -> None:
    n, gamma = 5000, 0.999
    got = discounted_returns(torch.ones(n, dtype=torch.float64), torch.tensor([n]), gamma)
    want = [(1 - gamma ** (n - t)) / (1 - gamma) for t in range(n)]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9)


@BUSY
@given(PAIRS, st.randoms(use_true_random=False))
def test_a_response_does_not_see_the_others(pair: tuple[Dataset, Dataset], random) -> None:
    rewards, values = pair
    order = list(range(len(rewards)))
    random.shuffle(order)
    whole, _ = gae(flat([rewards[i] for i in order]), flat([values[i] for i in order]), sizes(rewards)[order])
    alone = [gae(flat([rewards[i]]), flat([values[i]]), sizes([rewards[i]]))[0] for i in order]
    assert whole.tolist() == [x for part in alone for x in part.tolist()]


@BUSY
@given(PAIRS, st.sampled_from([-2.0, 0.5, 8.0]))
def test_scaling_scales(pair: tuple[Dataset, Dataset], factor: float) -> None:
    rewards, values = pair
    plain = gae(flat(rewards), flat(values), sizes(rewards))
    scaled = gae(flat(rewards) * factor, flat(values) * factor, sizes(rewards))
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(b.numpy(), (a * factor).numpy(), rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_stays_in_its_response() -> None:
    rewards = torch.tensor([1.0, math.inf, math.nan])
    got = discounted_returns(rewards, torch.tensor([1, 1, 1]))
    assert got[0] == 1
    assert got[1] == math.inf
    got, _ = gae(torch.zeros(2), torch.tensor([1.0, math.nan]), torch.tensor([1, 1]))
    assert got[0] == -1


def test_scores_at_the_last_token() -> None:
    scores, lengths = torch.tensor([3.0, 7.0, -1.0]), torch.tensor([2, 0, 1])
    assert token_rewards(scores, lengths).tolist() == [0, 3, -1]
    assert token_rewards(scores, lengths, torch.tensor([0.5, 0.25, -2.0])).tolist() == [-0.5, 2.75, 1]
    assert token_rewards(torch.tensor([1, 0]), torch.tensor([1, 1])).dtype == torch.float32
    assert token_rewards(scores.bfloat16(), lengths, torch.zeros(3)).dtype == torch.bfloat16


@BUSY
@given(ROWS)
def test_undiscounted_returns_are_the_score(rows: Dataset) -> None:
    """Undiscounted, the return of every token of a response is its score."""
    scores = torch.arange(len(rows), dtype=torch.float64) + 0.1
    got = discounted_returns(token_rewards(scores, sizes(rows)), sizes(rows))
    assert got.tolist() == scores.repeat_interleave(sizes(rows)).tolist()


def by_whitening(rows: Dataset, eps: float) -> list[float]:
    values = [x for row in rows for x in row]
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return [(x - mean) / (deviation + eps) for x in values]


def whitened(rows: Dataset, eps: float = 1e-6) -> np.ndarray:
    return whiten(flat(rows), moments(flat(rows), sizes(rows)), eps).numpy()


def test_moments_by_hand() -> None:
    got = moments(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 0, 1]))
    assert got.dtype == torch.float64
    assert got.tolist() == [[2, 2, 2], [0, 0, 0], [1, 5, 0]]
    assert merge_moments(got).tolist() == [3, 3, 8]
    assert whiten(torch.tensor([1.0, 5.0]), got, 1.0).tolist() == pytest.approx([-2 / 3, 2 / 3])


@BUSY
@given(ROWS, st.sampled_from([1e-6, 1e-2, 1.0]))
def test_whitening_matches_the_reference(rows: Dataset, eps: float) -> None:
    np.testing.assert_allclose(whitened(rows, eps), by_whitening(rows, eps), rtol=1e-7, atol=1e-7)


@BUSY
@given(ROWS, st.data())
def test_whitening_is_the_same_in_any_layout(rows: Dataset, data: st.DataObject) -> None:
    """To the bit: whichever worker has which responses, and in whatever order their moments come together."""
    whole = whiten(flat(rows), moments(flat(rows), sizes(rows)))
    parts = whole.split(sizes(rows).tolist()) if rows else ()
    order = data.draw(st.permutations(range(len(rows))))
    worker = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    shares = [[i for i in order if worker[i] == w] for w in range(3)]
    apart = [[rows[i] for i in share] for share in shares]
    together = torch.cat([moments(flat(mine), sizes(mine)) for mine in apart])
    for share, mine in zip(shares, apart, strict=True):
        got = whiten(flat(mine), together).tolist()
        assert got == [x for i in share for x in parts[i].tolist()]
    # Merged once more, a row per worker, it is the same but for rounding.
    rows_of = torch.stack([merge_moments(moments(flat(mine), sizes(mine))) for mine in apart])
    np.testing.assert_allclose(merge_moments(rows_of), merge_moments(together), rtol=1e-12, atol=1e-9)


@BUSY
@given(ROWS, st.sampled_from([-1e6, 0.3, 1e6]), st.sampled_from([0.001, 3.0, 1e4]))
def test_shift_and_scale_change_nothing(rows: Dataset, shift: float, factor: float) -> None:
    moved = [[x * factor + shift for x in row] for row in rows]
    # Rounding the sums can merge values that were apart; eps keeps that small.
    np.testing.assert_allclose(whitened(moved, 0.01 * factor), whitened(rows, 0.01), atol=1e-4)


@BUSY
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.lists(st.integers(0, 5), max_size=6))
def test_equal_values_are_exactly_0(value: float, lengths: list[int]) -> None:
    for x, dtype in ((value, torch.float32), (value, torch.float64), (0.1, torch.float64)):
        values = torch.full((sum(lengths),), x, dtype=dtype)
        counts = torch.tensor(lengths, dtype=torch.int64)
        got = whiten(values, moments(values, counts))
        assert got.dtype == dtype
        assert got.tolist() == [0.0] * sum(lengths)
        assert explained_variance(moments(values, counts), moments(values * 2, counts)) == 0


def test_a_small_spread_beside_a_large_mean() -> None:
    values = 1e8 + torch.tensor([0.0, 1e-3, 2e-3, 3e-3], dtype=torch.float64)
    got = whiten(values, moments(values, torch.tensor([1, 3])), 1e-12)
    want = torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=torch.float64) / math.sqrt(5 / 3)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4)


def test_explained_variance_by_hand() -> None:
    returns, lengths = torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([1, 0, 3])

    def explained(values: list[float]) -> float:
        errors = returns - torch.tensor(values)
        return explained_variance(moments(returns, lengths), moments(errors, lengths))

    assert explained([1, 3, 5, 7]) == 1
    assert explained([0, 2, 4, 6]) == 1  # being off by a constant is not in the variance
    assert explained([9, 9, 9, 9]) == 0
    assert explained([7, 5, 3, 1]) == -3
    assert explained([1, 2, 5, 8]) == pytest.approx(0.9)  # errors 0 1 0 −1: 2 of 20 squares


@BUSY
@given(PAIRS)
@example(([[0.0, 2.887943827186691e-156]], [[0.0, 1.0]]))  # the square of the first is not 0, but almost
def test_explained_variance_matches_numpy(pair: tuple[Dataset, Dataset]) -> None:
    returns, values = (flat(rows).numpy() for rows in pair)
    errors = torch.from_numpy(returns - values)
    got = explained_variance(moments(flat(pair[0]), sizes(pair[0])), moments(errors, sizes(pair[0])))
    assert math.isfinite(got)
    if len(set(returns.tolist())) > 1 and np.var(returns) > 1e-9:
        assert got == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    none, counts = torch.zeros(0), torch.tensor(lengths, dtype=torch.int64)
    assert [x.shape for x in gae(none, none, counts)] == [(0,), (0,)]
    assert discounted_returns(none, counts).shape == (0,)
    assert token_rewards(torch.ones(len(lengths)), counts).shape == (0,)
    parts = moments(none, counts)
    assert parts.tolist() == [[0.0] * 3] * len(lengths)
    assert merge_moments(parts).tolist() == [0, 0, 0]
    assert whiten(none, parts).shape == (0,)
    assert explained_variance(parts, parts) == 0


def test_only_the_result_is_rounded() -> None:
    rewards, values, lengths = torch.rand(300).bfloat16(), torch.rand(300).bfloat16(), torch.tensor([100, 200])
    got, exact = gae(rewards, values, lengths), gae(rewards.double(), values.double(), lengths)
    for a, b in zip(got, exact, strict=True):
        assert torch.equal(a, b.bfloat16())
    assert torch.equal(discounted_returns(rewards, lengths), discounted_returns(rewards.double(), lengths).bfloat16())


def test_invalid_arguments_are_refused() -> None:
    one, two = torch.zeros(1), torch.tensor([2])
    with pytest.raises(DataError, match=r"rewards are \[1\], but the lengths sum to 2 tokens"):
        gae(one, one, two)
    with pytest.raises(DataError, match=r"values are \[1\]"):
        moments(one, two)
    with pytest.raises(DataError, match=r"penalties are \[1\]"):
        token_rewards(one, two, one)
    with pytest.raises(DataError, match=r"scores \[2\] and lengths \[1\]"):
        token_rewards(torch.zeros(2), two)
    with pytest.raises(ConfigError, match=r"gamma of the returns is 1\.1; it must be within 0"):
        discounted_returns(one, torch.tensor([1]), 1.1)
    with pytest.raises(ConfigError, match=r"lam of the returns is -0\.1"):
        gae(one, one, torch.tensor([1]), lam=-0.1)
    with pytest.raises(ConfigError, match="eps of whitening is 0"):
        whiten(one, torch.zeros(0, 3, dtype=torch.float64), 0.0)
