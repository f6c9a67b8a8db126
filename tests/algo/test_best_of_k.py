"""Advantages of the best of k, and of several rewards: by hand, and a reference over all choices."""

import math
from itertools import combinations
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.advantages import best_of_k_advantages, group_advantages, summed_advantages
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None, max_examples=50)  # the first example waits for torch
SCORES = st.lists(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-5, 5), min_size=1, max_size=6)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def best(scores: list[float], k: int, baseline: str) -> list[float]:
    n, k = len(scores), min(k, len(scores))
    choices = list(combinations(range(n), k))
    bests = [max(scores[i] for i in c) for c in choices]
    advantages = []
    for i in range(n):
        own = [c for c in choices if i in c]
        if n == 1:
            advantages.append(0.0)
        elif baseline == "mean":
            spread = pstdev(bests)
            with_it = fmean(max(scores[j] for j in c) for c in own)
            advantages.append((with_it - fmean(bests)) / (spread + 1e-6) if spread > 1e-12 else 0.0)
        elif k == 1:
            advantages.append(scores[i] - fmean(s for j, s in enumerate(scores) if j != i))
        else:
            advantages.append(fmean(max(scores[j] for j in c) - max(scores[j] for j in c if j != i) for c in own))
    return advantages


@pytest.mark.parametrize("baseline", ["without", "mean"])
@BUSY
@given(scores=SCORES, more=SCORES, k=st.integers(1, 7))
def test_it_is_the_mean_over_all_choices(baseline: str, scores: list[float], more: list[float], k: int) -> None:
    groups = torch.tensor([5] * len(scores) + [-1] * len(more))
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))
    got = best_of_k_advantages(tensor(scores + more)[order], groups[order], k, baseline)  # type: ignore[arg-type]
    want = np.array(best(scores, k, baseline) + best(more, k, baseline))[order.numpy()]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    one = tensor([0, 0, 1, 0])
    same = torch.zeros(4, dtype=torch.int64)
    assert best_of_k_advantages(one, same, 2).tolist() == [0, 0, 1, 0]
    # pass@2 is 1/2, its deviation 1/2; a wrong one has the right one in 1 of 3 choices
    assert best_of_k_advantages(one, same, 2, "mean").tolist() == pytest.approx([-1 / 3, -1 / 3, 1, -1 / 3], abs=1e-5)
    assert best_of_k_advantages(tensor([1, 1, 1]), same[:3], 2).tolist() == [0, 0, 0]
    assert best_of_k_advantages(tensor([0, 3, 5]), same[:3], 3).tolist() == [0, 0, 2]
    assert best_of_k_advantages(torch.zeros(0), same[:0], 3).tolist() == []


def test_the_weights_are_the_gradient_of_max_at_k() -> None:
    """Σ advantage · grad log p, over all samples of size n from a policy, is the gradient of max@k times n / k."""
    logits = torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64, requires_grad=True)
    rewards, n, k = tensor([0.0, 1.0, 3.0]), 3, 2
    log_p = logits.log_softmax(0)
    surrogate = torch.zeros((), dtype=torch.float64)
    target = torch.zeros((), dtype=torch.float64)
    for draw in np.ndindex(*[3] * n):
        a = best_of_k_advantages(rewards[list(draw)], torch.zeros(n, dtype=torch.int64), k)
        surrogate = surrogate + log_p[list(draw)].sum().exp().detach() * (a * log_p[list(draw)]).sum()
    for draw in np.ndindex(*[3] * k):
        target = target + log_p[list(draw)].sum().exp() * rewards[list(draw)].max()
    (got,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (want,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(got * k / n, want)


@BUSY
@given(st.lists(st.lists(st.floats(-5, 5) | st.just(math.nan), min_size=2, max_size=2), min_size=1, max_size=8))
def test_summed_advantages(rows: list[list[float]]) -> None:
    groups, weights = [i % 2 for i in range(len(rows))], [2.0, -0.5]
    totals = [0.0] * len(rows)
    for f, weight in enumerate(weights):
        for i, row in enumerate(rows):
            mates = [r[f] for r, g in zip(rows, groups, strict=True) if g == groups[i] and not math.isnan(r[f])]
            if not math.isnan(row[f]) and len(set(mates)) > 1:
                totals[i] += weight * (row[f] - fmean(mates)) / (stdev(mates) + 1e-6)
    got = summed_advantages(tensor(rows).reshape(-1, 2), tensor(weights), torch.tensor(groups))  # type: ignore[arg-type]
    if len(set(totals)) == 1:
        assert got.tolist() == [0] * len(rows)
        return
    want = (np.array(totals) - fmean(totals)) / (stdev(totals) + 1e-6)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)


def test_a_small_reward_counts_as_much_as_a_large_one() -> None:
    scores = tensor([[0, 0], [100, 0], [0, 1], [100, 1]])  # type: ignore[list-item]
    got = summed_advantages(scores, tensor([1, 1]), torch.zeros(4, dtype=torch.int64))
    assert got[1].item() == pytest.approx(got[2].item(), abs=1e-5)
    assert got[0] < got[1] < got[3]


def test_scaled_by_the_mean() -> None:
    got = group_advantages(tensor([0, 0, 0, 1, 0, 0]), torch.tensor([1, 1, 1, 1, 2, 2]), "mean")
    assert got.tolist() == [-1, -1, -1, 3, 0, 0]


def test_invalid_arguments_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ConfigError, match="k = 0; it must be 1 or more"):
        best_of_k_advantages(torch.zeros(0), none, 0)
    with pytest.raises(ConfigError, match="unknown baseline of advantages 'meen'; did you mean 'mean'"):
        best_of_k_advantages(torch.zeros(0), none, 1, "meen")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"scores \[2\] and weights \[1\]"):
        summed_advantages(torch.zeros(2), torch.zeros(1), none)
