"""Variants of the clipped objective: values and gradients as loops over samples and tokens give them."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from algo.test_losses import cases, flat, tokens_of
from distflow.algo import losses
from distflow.algo.losses import Loss, cispo, cpgd, dcpo, dppo, gmpo, gspo, policy, reinforce, sapo, vespo
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError
from distflow.flows.cpgd import cpgd as cpgd_flow

BUSY = settings(deadline=None)
Case = dict[str, list]
Reference = Callable[[Case], tuple[list[float], list[float]]]  # of each token: the loss, its gradient


def one(log_ratio: float, advantage: float) -> Case:
    """A single token."""
    return {"new": [[log_ratio - 1]], "old": [[-1.0]], "ref": [[0.0]], "entropy": [[0.0]], "advantage": [advantage]}


def each(case: Case) -> list[tuple[int, int]]:
    return [(i, t) for i, row in enumerate(case["new"]) for t in range(len(row))]


def log_ratio(case: Case, i: int, t: int) -> float:
    return case["new"][i][t] - case["old"][i][t]


def by_gspo(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, _ in each(case):
        n = len(case["new"][i])
        ratio = math.exp(math.fsum(log_ratio(case, i, t) for t in range(n)) / n)
        advantage = case["advantage"][i]
        bounded = min(max(ratio, 0.9), 1.2)
        loss, slope = -min(ratio * advantage, bounded * advantage), -ratio * advantage
        if bounded * advantage < ratio * advantage or (advantage < 0 and ratio > 3):
            slope = 0.0
        losses.append(min(loss, -3 * advantage) if advantage < 0 else loss)
        slopes.append(slope)
    return losses, slopes


def by_dcpo(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, t in each(case):
        q, ratio, advantage = math.exp(case["old"][i][t]), math.exp(log_ratio(case, i, t)), case["advantage"][i]
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.1 / q, 0))
        high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.3 / q), 2)
        bounded = min(max(ratio, low), high)
        clipped = bounded * advantage < ratio * advantage or (advantage < 0 and ratio > 2)
        losses.append(-min(ratio * advantage, bounded * advantage))
        losses[-1] = min(losses[-1], -2 * advantage) if advantage < 0 else losses[-1]
        slopes.append(0.0 if clipped else -ratio * advantage)
    return losses, slopes


def by_cispo(case: Case) -> tuple[list[float], list[float]]:
    weights = [min(max(math.exp(log_ratio(case, i, t)), 0.5), 1.3) for i, t in each(case)]
    slopes = [-w * case["advantage"][i] for w, (i, _) in zip(weights, each(case), strict=True)]
    return [s * case["new"][i][t] for s, (i, t) in zip(slopes, each(case), strict=True)], slopes


def by_cpgd(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, t in each(case):
        x, advantage = log_ratio(case, i, t), case["advantage"][i]
        bounded = min(max(x, math.log(0.8)), math.log(1.2))
        clipped = bounded * advantage < x * advantage
        far = x - math.log(3)  # the drift pulls by ratio − 1, at most 2, and so is a line from there on
        drift = math.exp(x) - 1 - x if far <= 0 else 2 - math.log(3) + 2 * far
        losses.append(-min(x * advantage, bounded * advantage) + 0.1 * drift)
        slopes.append((0.0 if clipped else -advantage) + 0.1 * min(math.exp(x) - 1, 2))
    return losses, slopes


def by_reinforce(case: Case) -> tuple[list[float], list[float]]:
    slopes = [-case["advantage"][i] for i, _ in each(case)]
    return [s * case["new"][i][t] for s, (i, t) in zip(slopes, each(case), strict=True)], slopes


def by_sapo(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, t in each(case):
        ratio, advantage = math.exp(log_ratio(case, i, t)), case["advantage"][i]
        tau = 0.5 if advantage > 0 else 2.0
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-advantage * gate * 4 / tau)
        slopes.append(-advantage * 4 * gate * (1 - gate) * ratio)
    return losses, slopes


def by_gmpo(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, t in each(case):
        n, advantage = len(case["new"][i]), case["advantage"][i]
        own = [log_ratio(case, i, s) for s in range(n)]
        bounded = [min(max(x, -0.4), 0.4) for x in own]
        used = [
            min(x, b) if advantage > 0 else max(x, b) if advantage < 0 else 0 * x
            for x, b in zip(own, bounded, strict=True)
        ]
        ratio = math.exp(math.fsum(used) / n)
        losses.append(-ratio * advantage)
        slopes.append(-ratio * advantage * (used[t] == own[t]))  # n tokens have the loss, each 1/n of this slope
    return losses, slopes


def by_dppo(case: Case) -> tuple[list[float], list[float]]:
    slopes = []
    for i, t in each(case):
        advantage = case["advantage"][i]
        moved = math.exp(case["new"][i][t]) - math.exp(case["old"][i][t])
        outside = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
        slopes.append(0.0 if outside else -advantage * math.exp(log_ratio(case, i, t)))
    return slopes, slopes


def by_vespo(case: Case) -> tuple[list[float], list[float]]:
    slopes = []
    for i, _ in each(case):
        advantage = case["advantage"][i]
        log_w = math.fsum(log_ratio(case, i, s) for s in range(len(case["new"][i])))
        w = math.exp(min(max(log_w, -20), 20))
        k, decay = (1.5, 3.0) if advantage >= 0 else (3.0, 2.5)
        slopes.append(-(w**k) * math.exp(decay * (1 - w)) * advantage)
    return [s * case["new"][i][t] for s, (i, t) in zip(slopes, each(case), strict=True)], slopes


def by_kl_cov(case: Case) -> tuple[list[float], list[float]]:
    losses, slopes = [], []
    for i, t in each(case):
        x, advantage, chosen = log_ratio(case, i, t), case["advantage"][i], (i + t) % 2
        losses.append(-math.exp(x) * advantage + 0.7 * chosen * abs(x))
        slopes.append(-math.exp(x) * advantage + 0.7 * chosen * np.sign(x))
    return losses, slopes


def kl_cov(tokens: Tokens, **constants: Any) -> Loss:
    """The loss, with every other token as one of high covariance."""
    places = torch.cat([torch.arange(i, i + n) for i, n in enumerate(tokens.lengths.tolist())] or [torch.zeros(0)])
    fields = {**tokens.per_token, "high_covariance": (places % 2).to(tokens.logprobs.dtype)}
    return losses.kl_cov(replace(tokens, per_token=fields), **constants)


KINDS: list[tuple[Callable[..., Loss], dict[str, Any], Reference]] = [
    (gspo, {"clip": 0.1, "clip_high": 0.2}, by_gspo),
    (dcpo, {"clip": 0.1, "clip_high": 0.3, "dual_clip": 2.0}, by_dcpo),
    (cispo, {"clip": 0.5, "clip_high": 0.3}, by_cispo),
    (cpgd, {"clip": 0.2, "drift": 0.1}, by_cpgd),
    (reinforce, {}, by_reinforce),
    (sapo, {"tau": 0.5, "tau_negative": 2.0}, by_sapo),
    (gmpo, {}, by_gmpo),
    (dppo, {}, by_dppo),
    (kl_cov, {"penalty": 0.7}, by_kl_cov),
    (vespo, {"power": 1.5, "decay_negative": 2.5}, by_vespo),
]
NAMES = [kind[0].__name__ for kind in KINDS]


@pytest.mark.parametrize(("loss", "constants", "reference"), KINDS, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_matches_the_reference(
    loss: Callable[..., Loss], constants: dict[str, Any], reference: Reference, case: Case
) -> None:
    new = flat(case["new"]).requires_grad_()
    got = loss(tokens_of(case, new), **constants).per_token
    got.sum().backward()
    want, slopes = reference(case)
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-9, atol=1e-12)
    assert new.grad is not None
    # At a kink, where ratio and bound are equal, either slope is right.
    close = np.isclose(new.grad.numpy(), slopes, rtol=1e-9, atol=1e-12)
    assert close.all() or all(
        abs(log_ratio(case, i, t)) in KINKS for (i, t), c in zip(each(case), close, strict=True) if not c
    )


KINKS = {0.4, -0.4, math.log(1.2), -math.log(0.8), math.log(1.3), -math.log(0.9), -math.log(0.5), math.log(3)}


@pytest.mark.parametrize(("loss", "constants", "reference"), KINDS, ids=NAMES)
@BUSY
@given(case=cases(limit=1e4))
def test_always_finite(loss: Callable[..., Loss], constants: dict[str, Any], reference: Reference, case: Case) -> None:
    for dtype in (torch.float32, torch.float64):
        new = flat(case["new"]).to(dtype).requires_grad_()
        result = loss(tokens_of(case, new), **constants, kl=0.1, entropy=0.01)
        result.per_token.sum().backward()
        assert new.grad is not None
        for values in (result.per_token, new.grad, *result.metrics.values()):
            assert values.isfinite().all()


@pytest.mark.parametrize("loss", [gspo, dcpo, cispo, cpgd, reinforce, gmpo, dppo, kl_cov])
@BUSY
@given(case=cases())
def test_on_policy_all_of_them_have_the_gradient_of_the_policy(loss: Callable[..., Loss], case: Case) -> None:
    grads = []
    for one in (loss, policy):
        new = flat(case["new"]).requires_grad_()
        tokens = tokens_of({**case, "old": case["new"]}, new)
        one(tokens).per_token.sum().backward()
        assert new.grad is not None
        grads.append(new.grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [gspo, dcpo, cispo, cpgd, reinforce, gmpo, dppo, kl_cov])
@BUSY
@given(case=cases(), bonus=st.floats(-0.1, 0.1), kl=st.sampled_from([0.0, 0.2]))
def test_kl_and_entropy_are_added(loss: Callable[..., Loss], case: Case, bonus: float, kl: float) -> None:
    plain, more = loss(tokens_of(case)), loss(tokens_of(case), kl=kl, kl_estimator="k2", entropy=bonus)
    x = flat(case["new"]) - flat(case["ref"])
    want = plain.per_token + kl * x * x / 2 - bonus * flat(case["entropy"])
    assert torch.allclose(more.per_token, want, rtol=1e-10, atol=1e-12)
    assert ("actor/kl" in more.metrics) == (kl > 0)


def gspo_tokens(log_ratios: list[float], advantage: float) -> tuple[Tokens, Tensor]:
    old = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    new = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    sample = {"advantage": torch.tensor([advantage], dtype=torch.float64)}
    return Tokens(new, torch.tensor([len(log_ratios)]), {"old_logprobs": old}, sample), new


def test_gspo_keeps_outliers_in_the_mean() -> None:
    tokens, _ = gspo_tokens([-60.0] + [0.0] * 99, 1.0)
    assert gspo(tokens).metrics["actor/ratio"].tolist() == pytest.approx([math.exp(-0.6)] * 100)  # 0.55, not e^−0.2


@BUSY
@given(st.lists(st.floats(-60, 60), min_size=1, max_size=5), st.sampled_from([-1.0, 1.0]), st.booleans())
def test_gspo_is_clamped_at_the_mean(log_ratios: list[float], advantage: float, bounded: bool) -> None:
    """The gradient over a response is that of its clamped ratio, as finite differences of the formula have it."""
    dual_clip = 3.0 if bounded else math.inf
    mean = math.fsum(log_ratios) / len(log_ratios)
    tokens, new = gspo_tokens(log_ratios, advantage)
    result = gspo(tokens, clip=0.1, clip_high=0.2, dual_clip=3.0 if bounded else 0.0)
    (result.per_token / len(log_ratios)).sum().backward()
    ratio = math.exp(min(max(mean, -20), 20))

    def slope(low: float, high: float) -> float:  # −A · ratio between the bounds
        return -advantage * ratio / len(log_ratios) if low < ratio < high else 0.0

    inside = slope(-1, 1.2) if advantage > 0 else slope(0.9, dual_clip)
    assert new.grad is not None
    assume(all(abs(ratio - kink) > 1e-6 for kink in (0.9, 1.2, 3)))
    want = [0.0 if abs(mean) > 20 else inside] * len(log_ratios)
    np.testing.assert_allclose(new.grad.numpy(), want, rtol=1e-9, atol=1e-12)
    gain = min(ratio * advantage, min(max(ratio, 0.9), 1.2) * advantage)
    want_loss = -max(gain, dual_clip * advantage) if advantage < 0 else -gain
    np.testing.assert_allclose(result.per_token.detach().numpy(), want_loss, rtol=1e-9)


@pytest.mark.parametrize("log_ratio", [-1e3, -40.0, 40.0, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_cpgd_clamps_no_log_ratio(log_ratio: float, advantage: float) -> None:
    tokens, new = gspo_tokens([log_ratio], advantage)
    result = cpgd(tokens, drift=0.0)
    result.per_token.sum().backward()
    unclipped = log_ratio * advantage < 0  # the side that PPO does not clip
    bound = math.log(1.2) if log_ratio > 0 else math.log(0.8)
    assert result.per_token.tolist() == pytest.approx([-advantage * (log_ratio if unclipped else bound)])
    assert new.grad is not None
    assert new.grad.tolist() == [-advantage if unclipped else 0]
    assert result.metrics["actor/ratio"].isfinite().all()


@pytest.mark.parametrize("loss", [cispo, cpgd, reinforce])
def test_minus_infinity_gives_finite_gradients(loss: Callable[..., Loss]) -> None:
    pairs = [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf), (-1.0, -2.0)]
    for advantage in (-1.0, 0.0, 1.0):
        new = torch.tensor([n for n, _ in pairs], requires_grad=True)
        old, sample = torch.tensor([o for _, o in pairs]), {"advantage": torch.tensor([advantage])}
        loss(Tokens(new, torch.tensor([4]), {"old_logprobs": old}, sample)).per_token.sum().backward()
        assert new.grad is not None
        assert new.grad.isfinite().all()


def test_both_defaults_of_the_drift_are_one() -> None:
    assert inspect.signature(cpgd).parameters["drift"].default == cpgd_flow.constants["drift"] == 0.001


def test_under_cpgd_the_gradient_does_not_grow_with_the_ratio() -> None:
    near, far = one(0.1, -1.0), one(5.0, -1.0)
    slopes = []
    for case in (near, far):
        new = flat(case["new"]).requires_grad_()
        cpgd(tokens_of(case, new), drift=0.0).per_token.sum().backward()
        assert new.grad is not None
        slopes.append(float(new.grad[0]))
    assert slopes == [1.0, 1.0]


@pytest.mark.parametrize(("ratio", "pull"), [(0.25, -0.75), (1.0, 0.0), (2.0, 1.0), (3.5, 2.0), (1e6, 2.0)])
def test_the_gradient_of_the_drift_penalty_is_bounded(ratio: float, pull: float) -> None:
    new = flat([[math.log(ratio) - 1]]).requires_grad_()
    result = cpgd(tokens_of(one(math.log(ratio), 0.0), new), drift=0.5)
    result.per_token.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.5 * pull])
    assert result.per_token.tolist() == pytest.approx([0.5 * float(result.metrics["actor/drift"][0])])


@pytest.mark.parametrize("loss", [gspo, cispo, cpgd])
def test_a_negative_bound_is_refused(loss: Callable[..., Loss]) -> None:
    case = one(0.0, 1.0)
    with pytest.raises(ConfigError, match=r"clip = -0\.1"):
        loss(tokens_of(case), clip=-0.1)
    with pytest.raises(ConfigError, match="kl = -1"):
        loss(tokens_of(case), kl=-1)


@BUSY
@given(case=cases(limit=2.0))
def test_an_unbiased_divergence_is_weighed_by_the_ratio(case: Case) -> None:
    plain = policy(tokens_of(case), kl=0.5)
    unbiased = policy(tokens_of(case), kl=0.5, kl_unbiased=True)
    ratios = [math.exp(log_ratio(case, i, t)) for i, t in each(case)]
    want = [r * k for r, k in zip(ratios, plain.metrics["actor/kl"].tolist(), strict=True)]
    np.testing.assert_allclose(unbiased.metrics["actor/kl"].numpy(), want, rtol=1e-9, atol=1e-12)
    assert unbiased.regularizer is not None
    np.testing.assert_allclose(unbiased.regularizer.numpy(), 0.5 * np.array(want), rtol=1e-9, atol=1e-12)


def test_invalid_constants_of_the_newer_ones_are_refused() -> None:
    for loss in (gmpo, dppo, dcpo):
        with pytest.raises(ConfigError, match="clip_high = -1"):
            loss(tokens_of(one(0.0, 1.0)), clip_high=-1)
    with pytest.raises(ConfigError, match="tau_negative = 0"):
        sapo(tokens_of(one(0.0, 1.0)), tau_negative=0)
