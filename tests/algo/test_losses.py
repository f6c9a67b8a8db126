"""Losses per token: numbers by hand, a reference in loops, gradients, and nothing that is not finite."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.losses import Loss, gspo, nll, policy
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch


def logs(ratios: list[float]) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def given_ratios(ratios: list[float], advantages: list[float]) -> tuple[Tokens, Tensor]:
    """One sample whose tokens have these ratios and advantages; and its leaf."""
    old = torch.linspace(-3, -0.1, len(ratios), dtype=torch.float64)
    new = (old + logs(ratios)).requires_grad_()
    advantage = torch.tensor(advantages, dtype=torch.float64)
    lengths = torch.tensor([len(ratios)])
    return Tokens(new, lengths, {"old_logprobs": old, "advantage": advantage}), new


def test_nll_by_hand() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    loss = nll(Tokens(logprobs, torch.tensor([2])))
    loss.per_token.sum().backward()
    assert loss.per_token.tolist() == [0.5, 2]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1, -1]
    assert loss.metrics == {}


#        ratio, advantage -> loss, clipped, gradient (−ratio · advantage where not clipped), with 0.8 … 1.3
BY_HAND = [
    (1.5, 2.0, -2.6, 1, 0.0),
    (1.5, -2.0, 3.0, 0, 3.0),
    (0.5, 2.0, -1.0, 0, -1.0),
    (0.5, -2.0, 1.6, 1, 0.0),
    (1.25, 1.0, -1.25, 0, -1.25),
    (0.9, -3.0, 2.7, 0, 2.7),
    (1.0, 0.5, -0.5, 0, -0.5),
    (7.0, 0.0, 0.0, 0, 0.0),
]


def test_policy_by_hand() -> None:
    ratios, advantages, losses, clipped, gradients = (list(column) for column in zip(*BY_HAND, strict=True))
    tokens, new = given_ratios(ratios, advantages)
    loss = policy(tokens, clip=0.2, clip_high=0.3)
    loss.per_token.sum().backward()
    assert new.grad is not None
    assert loss.per_token.tolist() == pytest.approx(losses)
    assert loss.metrics["actor/clip_frac"].tolist() == clipped
    assert new.grad.tolist() == pytest.approx(gradients)
    assert loss.metrics["actor/pg_loss"].tolist() == pytest.approx(losses)
    assert loss.metrics["actor/ratio"].tolist() == pytest.approx(ratios)
    assert loss.metrics["actor/ppo_kl"].tolist() == pytest.approx([-math.log(r) for r in ratios])
    assert set(loss.metrics) == {
        "actor/pg_loss",
        "actor/clip_frac",
        "actor/dual_clip_frac",
        "actor/ppo_kl",
        "actor/ratio",
    }


#        ratio, advantage -> loss, gradient, bounded by dual_clip = 3
DUAL_BY_HAND = [
    (4.0, -2.0, 6.0, 0.0, 1),
    (22026.0, -1.0, 3.0, 0.0, 1),
    (2.9, -2.0, 5.8, 5.8, 0),
    (4.0, 2.0, -2.4, 0.0, 0),
    (0.1, -2.0, 1.6, 0.0, 0),
    (4.0, 0.0, 0.0, 0.0, 0),
]


def test_dual_clip_by_hand() -> None:
    ratios, advantages, losses, gradients, bounded = (list(column) for column in zip(*DUAL_BY_HAND, strict=True))
    tokens, new = given_ratios(ratios, advantages)
    loss = policy(tokens, dual_clip=3.0)
    loss.per_token.sum().backward()
    assert new.grad is not None
    assert loss.per_token.tolist() == pytest.approx(losses)
    assert loss.metrics["actor/pg_loss"].tolist() == pytest.approx(losses)
    assert new.grad.tolist() == pytest.approx(gradients)
    assert loss.metrics["actor/dual_clip_frac"].tolist() == bounded
    assert policy(tokens).per_token.tolist() == loss.per_token.tolist()  # 3 is the default
    unbounded = policy(tokens, dual_clip=0)
    assert unbounded.per_token.tolist()[:2] == pytest.approx([8, 22026])
    assert not unbounded.metrics["actor/dual_clip_frac"].any()


@pytest.mark.parametrize("loss", [policy, gspo])
def test_minus_infinity_gives_no_nan(loss: Callable[..., Loss]) -> None:
    """Under the new policy only, under the old one only, under both; with finite tokens beside them."""
    inf = math.inf
    pairs = [(-inf, -1.0), (-1.0, -2.0), (-1.0, -inf), (-2.0, -2.5), (-inf, -inf), (-inf, -1.0), (-1.0, -inf)]
    for advantage in (-1.0, 0.0, 1.0):
        for dtype in (torch.float32, torch.float64):
            new = torch.tensor([n for n, _ in pairs], dtype=dtype, requires_grad=True)
            old = torch.tensor([o for _, o in pairs], dtype=dtype)
            per_sample = {"advantage": torch.full((4,), advantage, dtype=dtype)}
            result = loss(Tokens(new, torch.tensor([2, 2, 1, 2]), {"old_logprobs": old}, per_sample), kl=0.0)
            result.per_token.sum().backward()
            assert new.grad is not None
            assert new.grad.isfinite().all()
            assert result.per_token.isfinite().all()
            assert not any(values.isnan().any() for values in result.metrics.values())
            assert float(new.grad[4]) == 0  # minus infinity on both sides is agreement
            assert float(result.metrics["actor/ratio"][4]) == 1


def test_the_upper_bound_is_clip_unless_clip_high_is_set() -> None:
    tokens, _ = given_ratios([1.25], [1.0])
    assert policy(tokens).per_token.tolist() == pytest.approx([-1.2])
    assert policy(tokens, clip=0.1).per_token.tolist() == pytest.approx([-1.1])
    assert policy(tokens, clip_high=0.28).per_token.tolist() == pytest.approx([-1.25])
    assert policy(tokens, clip_high=0.0).per_token.tolist() == pytest.approx([-1.0])


def test_kl_and_entropy_by_hand() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    fields = {"ref_logprobs": torch.tensor([-1.5, -1.0]), "advantage": torch.tensor([1.0, -1.0])}
    tokens = Tokens(new, torch.tensor([1, 1]), fields, entropy=entropy)
    loss = policy(tokens, kl=0.1, kl_estimator="k2", entropy=0.01)
    # −A + 0.1 · x²/2 − 0.01 · H with x = 0.5, −1
    assert loss.per_token.tolist() == pytest.approx([-1 + 0.0125 - 0.005, 1 + 0.05 - 0.015])
    assert loss.metrics["actor/pg_loss"].tolist() == [-1, 1]  # the policy part only
    assert loss.metrics["actor/kl"].tolist() == [0.125, 0.5]
    assert loss.metrics["actor/entropy"].tolist() == [0.5, 1.5]
    loss.per_token.sum().backward()
    assert new.grad is not None
    assert entropy.grad is not None
    assert new.grad.tolist() == pytest.approx([-1 + 0.05, 1 - 0.1])
    assert entropy.grad.tolist() == pytest.approx([-0.01, -0.01])
    assert loss.regularizer is not None
    assert loss.regularizer.tolist() == pytest.approx([0.0125 - 0.005, 0.05 - 0.015])
    assert policy(tokens, kl=0.1).metrics["actor/kl"].tolist() == pytest.approx([0.10653066, 0.71828183])  # k3


def test_a_controller_weighs_the_divergence() -> None:
    new = torch.tensor([-1.0, -2.0, -2.0])
    fields = {"ref_logprobs": torch.tensor([-1.5, -1.0, -1.0]), "advantage": torch.zeros(3)}
    lengths = torch.tensor([1, 0, 2])

    def losses(kl: float, **weights: dict[str, Tensor]) -> list[float]:
        per_token = {**fields, **weights.get("per_token", {})}
        result = policy(Tokens(new, lengths, per_token, weights.get("per_sample", {})), kl=kl, kl_estimator="k2")
        if kl:
            assert result.metrics["actor/kl"].tolist() == [0.125, 0.5, 0.5]  # what is measured is not weighed
        return result.per_token.tolist()

    assert losses(2.0) == [0.25, 1, 1]
    assert losses(1.0, per_sample={"kl_weight": torch.tensor([4.0, 9.0, 3.0])}) == [0.5, 1.5, 1.5]
    assert losses(2.0, per_token={"kl_weight": torch.tensor([4.0, 0.0, 3.0])}) == [1, 0, 3]
    assert losses(0.0, per_sample={"kl_weight": torch.ones(3)}) == [0, 0, 0]  # kl says whether there is any


def test_only_fields_in_use_are_read() -> None:
    tokens = Tokens(torch.zeros(1), torch.tensor([1]), per_sample={"advantage": torch.ones(1)})
    assert policy(tokens).per_token.tolist() == [-1]  # neither old nor reference log-probabilities
    assert "actor/kl" not in policy(tokens).metrics
    assert "actor/entropy" not in policy(tokens).metrics


@st.composite
def cases(draw: st.DrawFn, limit: float = 3.0) -> dict[str, list]:
    """Samples with 0 to 4 tokens: nested lists."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=5))

    def rows(values: st.SearchStrategy[float]) -> list[list[float]]:
        return [draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]

    values = st.floats(-limit, 0)
    return {
        "new": rows(values),
        "old": rows(values),
        "ref": rows(values),
        "entropy": rows(st.floats(0, 5)),
        "advantage": draw(st.lists(st.floats(-4, 4), min_size=len(lengths), max_size=len(lengths))),
    }


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def tokens_of(case: dict[str, list], new: Tensor | None = None, entropy: Tensor | None = None) -> Tokens:
    return Tokens(
        flat(case["new"]) if new is None else new,
        torch.tensor([len(row) for row in case["new"]], dtype=torch.int64),
        {"old_logprobs": flat(case["old"]), "ref_logprobs": flat(case["ref"])},
        {"advantage": torch.tensor(case["advantage"], dtype=torch.float64)},
        flat(case["entropy"]) if entropy is None else entropy,
    )


@BUSY
@given(
    cases(),
    st.floats(0, 0.5),
    st.none() | st.floats(0, 0.5),
    st.floats(1.01, 10) | st.just(0.0),
    st.sampled_from([0.0, 0.1]),
    st.floats(-0.1, 0.1),
)
def test_policy_matches_the_reference(
    case: dict[str, list], clip: float, clip_high: float | None, dual_clip: float, kl: float, bonus: float
) -> None:
    losses, clipped_at = [], []
    high = clip if clip_high is None else clip_high
    for i, advantage in enumerate(case["advantage"]):
        for t in range(len(case["new"][i])):
            ratio = math.exp(case["new"][i][t] - case["old"][i][t])
            bounded = min(max(ratio, 1 - clip), 1 + high)
            gain = min(ratio * advantage, bounded * advantage)
            if advantage < 0 and dual_clip:
                gain = max(gain, dual_clip * advantage)
            x = case["new"][i][t] - case["ref"][i][t]
            losses.append(-gain + kl * (math.exp(-x) - 1 + x) - bonus * case["entropy"][i][t])
            lost = (ratio - bounded) * advantage
            inside = 1 - clip + 1e-9 < ratio < 1 + high - 1e-9
            clipped_at.append(1 if lost > 1e-9 else 0 if lost < -1e-9 or inside else None)  # None: within rounding
    got = policy(tokens_of(case), clip, clip_high, dual_clip, kl=kl, entropy=bonus)
    np.testing.assert_allclose(got.per_token.numpy(), losses, rtol=1e-10, atol=1e-12)
    flags = got.metrics["actor/clip_frac"].tolist()
    assert all(want in (flag, None) for want, flag in zip(clipped_at, flags, strict=True))


def away_from_kinks(case: dict[str, list]) -> bool:
    ratios = [math.exp(n - o) for a, b in zip(case["new"], case["old"], strict=True) for n, o in zip(a, b, strict=True)]
    return len(ratios) > 0 and all(abs(r - bound) > 1e-3 for r in ratios for bound in (0.8, 1.3, 3))


@settings(max_examples=40, deadline=None)
@given(cases().filter(away_from_kinks), st.sampled_from(["k1", "k2", "k3"]))
def test_gradcheck(case: dict[str, list], kind) -> None:
    def run(new: Tensor, entropy: Tensor) -> Tensor:
        tokens = tokens_of(case, new, entropy)
        return policy(tokens, 0.2, 0.3, kl=0.1, kl_estimator=kind, entropy=0.01).per_token

    leaves = flat(case["new"]).requires_grad_(), flat(case["entropy"]).requires_grad_()
    assert torch.autograd.gradcheck(run, leaves)


@BUSY
@given(cases(), st.floats(0, 0.5), st.booleans())
def test_on_policy_the_gradient_is_that_of_the_policy(case: dict[str, list], clip: float, with_old: bool) -> None:
    """−A · ∇logp · w, for any clip, whether equal old log-probs are passed or none."""
    new = flat(case["new"]).requires_grad_()
    lengths = torch.tensor([len(row) for row in case["new"]], dtype=torch.int64)
    advantage = torch.tensor(case["advantage"], dtype=torch.float64)
    weights = torch.arange(len(new), dtype=torch.float64) + 1
    tokens = Tokens(new, lengths, {"old_logprobs": new.detach().clone()} if with_old else {}, {"advantage": advantage})
    loss = policy(tokens, clip)
    (loss.per_token * weights).sum().backward()
    spread = [a for a, row in zip(case["advantage"], case["new"], strict=True) for _ in row]
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), -np.array(spread) * weights.numpy(), rtol=1e-15, atol=1e-300)
    assert (loss.metrics["actor/ratio"] == 1).all()
    assert (loss.metrics["actor/clip_frac"] == 0).all()
    assert (loss.metrics["actor/ppo_kl"] == 0).all()


@BUSY
@given(cases(limit=1e4), st.sampled_from(["k1", "k2", "k3"]))
def test_always_finite(case: dict[str, list], kind) -> None:
    for dtype in (torch.float32, torch.float64):
        new = flat(case["new"]).to(dtype).requires_grad_()
        loss = policy(tokens_of(case, new), kl=0.1, kl_estimator=kind, entropy=0.01)
        loss.per_token.sum().backward()
        assert new.grad is not None
        for values in (loss.per_token, new.grad, *loss.metrics.values()):
            assert values.isfinite().all()


@pytest.mark.parametrize("difference", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_huge_ratios_are_bounded(difference: float, advantage: float) -> None:
    new = torch.tensor([difference], requires_grad=True)
    tokens = Tokens(new, torch.tensor([1]), {"old_logprobs": torch.zeros(1), "advantage": torch.tensor([advantage])})
    loss = policy(tokens)
    loss.per_token.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0]
    assert loss.metrics["actor/ratio"].tolist() == pytest.approx([math.exp(math.copysign(20, difference))], rel=1e-5)
    assert loss.per_token.isfinite().all()
    assert loss.metrics["actor/ppo_kl"].tolist() == [-difference]  # as it is: it is to be noticed


@BUSY
@given(cases(), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.01]), st.floats(0, 3))
def test_a_correction_weighs_the_policy_term_only(
    case: dict[str, list], kl: float, bonus: float, factor: float
) -> None:
    """Values and gradients are factor · policy term + kl · divergence − entropy, term by term."""
    weights = factor + torch.arange(sum(map(len, case["new"])), dtype=torch.float64) / 10
    grads, values = [], []
    for corrected in (True, False):
        new, entropy = flat(case["new"]).requires_grad_(), flat(case["entropy"]).requires_grad_()
        tokens = tokens_of(case, new, entropy)
        if corrected:
            total = policy(tokens, kl=kl, entropy=bonus).corrected(weights)
        else:
            x = new - flat(case["ref"])
            total = weights * policy(tokens).per_token + kl * ((-x).exp() - 1 + x) - bonus * entropy
        total.sum().backward()
        values.append(total.detach().numpy())
        grads.append([torch.zeros(0) if leaf.grad is None else leaf.grad for leaf in (new, entropy)])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grads[0][0], grads[1][0], rtol=1e-9, atol=1e-12)
    if bonus:
        np.testing.assert_allclose(grads[0][1], grads[1][1], rtol=1e-9, atol=1e-12)


@BUSY
@given(cases())
def test_metrics_are_per_token_and_detached(case: dict[str, list]) -> None:
    new, entropy = flat(case["new"]).requires_grad_(), flat(case["entropy"]).requires_grad_()
    loss = policy(tokens_of(case, new, entropy), kl=0.1, entropy=0.01)
    assert loss.per_token.requires_grad
    assert loss.per_token.shape == new.shape
    assert len(loss.metrics) == 7
    for values in loss.metrics.values():
        assert values.shape == new.shape
        assert not values.requires_grad


def test_invalid_arguments_are_refused() -> None:
    tokens, _ = given_ratios([1.0], [1.0])
    with pytest.raises(ConfigError, match="needs field 'ref_logprobs'"):
        policy(tokens, kl=0.1)
    with pytest.raises(ConfigError, match="needs field 'advantage'"):
        policy(Tokens(torch.zeros(1), torch.tensor([1])))
    with pytest.raises(ConfigError, match=r"entropy = 0\.01, but the model computes none"):
        policy(tokens, entropy=0.01)
    for name in ("clip", "clip_high", "kl"):
        with pytest.raises(ConfigError, match=f"{name} = -0.1; it must be 0 or more"):
            policy(tokens, **{name: -0.1})  # type: ignore[arg-type]
    for dual_clip in (1.0, 0.5, -3.0, math.nan):
        with pytest.raises(ConfigError, match=r"dual_clip = .*; it must be above 1, or 0"):
            policy(tokens, dual_clip=dual_clip)
