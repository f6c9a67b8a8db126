"""Losses per token; flows call them by their names in this module. `aggregate` reduces them to one number."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distflow.algo.distillation import divergence as divergence_from_teacher
from distflow.algo.kl import k3, log_ratio
from distflow.algo.kl import kl as kl_estimate
from distflow.algo.options import Divergence, Estimator, Fraction, NonNegative, Positive
from distflow.algo.preferences import dpo, kto, orpo, preference
from distflow.algo.tokens import Loss, MissingFieldError, Tokens
from distflow.errors import ConfigError

__all__ = [
    "Loss",
    "cispo",
    "cpgd",
    "dcpo",
    "dpo",
    "dppo",
    "gkd",
    "gmpo",
    "gspo",
    "kl_cov",
    "kto",
    "nll",
    "orpo",
    "policy",
    "preference",
    "reinforce",
    "sapo",
    "value",
    "vespo",
    "with_kl_and_entropy",
]

MAX_LOG_RATIO = 20.0  # keeps the ratio finite; beyond it the gradient is 0
MAX_SUMMAND = 1e30  # keeps sums of log-ratios finite
MAX_DRIFT = 2.0  # bounds the gradient of the drift penalty of a token


def nll(tokens: Tokens) -> Loss:
    """Returns the negative log-likelihood, for supervised fine-tuning."""
    return Loss(-tokens.logprobs)


def policy(
    tokens: Tokens,
    clip: NonNegative = 0.2,
    clip_high: NonNegative | None = None,
    dual_clip: NonNegative = 3.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """PPO's clipped objective, with a ratio per token. Reads `advantage`, `old_logprobs`, and `ref_logprobs` if kl > 0.

    `clip` bounds the ratio to 1 − clip … 1 + clip_high (by default `clip`), and `dual_clip` bounds it where the
    advantage is negative, for which PPO has no upper bound (arXiv 1912.09729; 0: as in PPO). `kl` and `entropy` are
    weights of the KL divergence and of the entropy bonus. Without a field `old_logprobs` the update is on-policy: the
    ratio is 1.
    """
    clipped = _clipped(tokens, _ratio(_log_ratio(tokens)), _bounds(clip, clip_high), dual_clip)
    return with_kl_and_entropy(tokens, *clipped, kl, kl_estimator, entropy, kl_unbiased)


def dcpo(
    tokens: Tokens,
    clip: NonNegative = 0.16,
    clip_high: NonNegative | None = 0.2,
    dual_clip: NonNegative = 10.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """DCPO: `policy` with bounds of each token that are the wider the rarer it was (arXiv 2509.02333).

    With its old probability q, the ratio r is clipped where r |r − 1| q is above `clip` or `clip_high`, to 0.5 at least
    and `dual_clip` at most.
    """
    below, above = _clips("dcpo", clip, clip_high)
    old = tokens["old_logprobs"] if "old_logprobs" in tokens else tokens.logprobs.detach()
    rarity = (-old).clamp(max=MAX_LOG_RATIO).exp()
    low = 0.5 + (1 - 4 * below * rarity).clamp(min=0).sqrt() / 2
    high = (0.5 + (1 + 4 * above * rarity).sqrt() / 2).clamp(max=dual_clip or None)
    clipped = _clipped(tokens, _ratio(_log_ratio(tokens)), (low, high), dual_clip)
    return with_kl_and_entropy(tokens, *clipped, kl, kl_estimator, entropy, kl_unbiased)


def gspo(
    tokens: Tokens,
    clip: NonNegative = 3e-4,
    clip_high: NonNegative | None = 4e-4,
    dual_clip: NonNegative = 3.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """GSPO: `policy` with one ratio per response, the geometric mean of its tokens' (arXiv 2507.18071).

    Each token has the value of the response's ratio and the gradient of its own: if all tokens of a response weigh the
    same, these add up to the gradient of the response's ratio.
    """
    own = _log_ratio(tokens)
    total = tokens.sum_per_sample(own.detach().clamp(-MAX_SUMMAND, MAX_SUMMAND))
    mean = tokens.expand(total / tokens.lengths.clamp(min=1))
    own = torch.where(own.isfinite(), own, 0.0)  # infinite ones are in the mean, and have no gradient
    clipped = _clipped(tokens, _ratio(mean + (own - own.detach())), _bounds(clip, clip_high), dual_clip)
    return with_kl_and_entropy(tokens, *clipped, kl, kl_estimator, entropy, kl_unbiased)


def cispo(
    tokens: Tokens,
    clip: NonNegative = 1.0,
    clip_high: NonNegative | None = 0.2,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """CISPO: the clipped ratio is a weight without gradient, so that every token is trained (arXiv 2506.13585)."""
    low, high = _bounds(clip, clip_high)
    ratio = _ratio(_log_ratio(tokens)).detach()
    weight = ratio.clamp(low, high)
    per_token = -weight * tokens["advantage"] * tokens.logprobs
    metrics = {"actor/pg_loss": per_token, "actor/clip_frac": (weight != ratio).to(ratio.dtype), "actor/ratio": ratio}
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def cpgd(
    tokens: Tokens,
    clip: NonNegative = 0.2,
    clip_high: NonNegative | None = None,
    drift: NonNegative = 0.001,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """CPGD: the log-ratio in place of the ratio, and a penalty of weight `drift` on policy drift (arXiv 2505.12504).

    The gradient of a token then does not grow with its ratio; the gradient of its penalty is min(ratio − 1, 2).
    """
    low, high = _bounds(clip, clip_high)
    x, advantage = _log_ratio(tokens), tokens["advantage"]
    unclipped = -x * advantage
    clipped = -x.clamp(math.log(max(low, 1e-6)), math.log(high)) * advantage
    per_token = torch.maximum(unclipped, clipped)
    divergence = k3(x, MAX_DRIFT)  # an estimate of KL(old‖new), as tokens are from the old policy
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > unclipped).to(x.dtype),
        "actor/drift": divergence,
        "actor/ratio": _ratio(x),
    }
    return with_kl_and_entropy(tokens, per_token + drift * divergence, metrics, kl, kl_estimator, entropy, kl_unbiased)


def sapo(
    tokens: Tokens,
    tau: Positive = 1.0,
    tau_negative: Positive = 1.05,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """SAPO: a sigmoid of the ratio in place of a clip, so that the gradient fades out smoothly (arXiv 2511.20347).

    −advantage · 4/τ · sigmoid(τ (ratio − 1)), with a τ of its own where the advantage is not above 0.
    """
    for name, value in (("tau", tau), ("tau_negative", tau_negative)):
        if not value > 0:
            raise ConfigError(f"the sapo loss has {name} = {value}; it must be above 0")
    ratio, advantage = _ratio(_log_ratio(tokens)), tokens["advantage"]
    steepness = torch.where(advantage > 0, tau, tau_negative)
    per_token = -advantage * torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
    metrics = {"actor/pg_loss": per_token, "actor/ppo_kl": -_log_ratio(tokens), "actor/ratio": ratio}
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def gmpo(
    tokens: Tokens,
    clip: NonNegative = 0.4,
    clip_high: NonNegative | None = None,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """GMPO: the geometric mean of clipped ratios of a response's tokens (arXiv 2507.20673).

    Log-ratios are clipped to −clip … clip_high (by default `clip`), on the side where the advantage would push them
    further. All tokens of a response have its value; each carries 1/length of its gradient.
    """
    below, above = _clips("gmpo", clip, clip_high)
    advantage, own = tokens["advantage"], _log_ratio(tokens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sign, bounded = advantage.sign(), own.clamp(-below, above)
    clipped = sign * torch.minimum(sign * own, sign * bounded)
    total = tokens.sum_per_sample(clipped)
    ratio = tokens.expand(total / tokens.lengths.clamp(min=1)).exp()
    per_token = -ratio * advantage
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped != own).to(own.dtype),
        "actor/ppo_kl": -_log_ratio(tokens),
        "actor/ratio": ratio,
    }
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def dppo(
    tokens: Tokens,
    clip: NonNegative = 0.2,
    clip_high: NonNegative | None = None,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """DPPO: bounds on the change of a token's probability instead of its ratio (arXiv 2602.04879).

    A token has no gradient if its probability has already moved, where the advantage pushes it, up by more than
    `clip_high` (by default `clip`) or down by more than `clip`. So rare tokens, whose ratios are noise,
    are not clipped.
    """
    below, above = _clips("dppo", clip, clip_high)
    advantage, logarithm = tokens["advantage"], _log_ratio(tokens)
    ratio = _ratio(logarithm)
    old = tokens["old_logprobs"] if "old_logprobs" in tokens else tokens.logprobs.detach()
    moved = tokens.logprobs.detach().exp() - old.exp()
    outside = ((advantage > 0) & (moved > above)) | ((advantage < 0) & (moved < -below))
    per_token = torch.where(outside, 0.0, -ratio * advantage)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": outside.to(ratio.dtype),
        "actor/ppo_kl": -logarithm,
        "actor/ratio": ratio,
    }
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def kl_cov(
    tokens: Tokens,
    penalty: NonNegative = 1.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """KL-Cov: the unclipped policy gradient, with a penalty on the log-ratios of some tokens (arXiv 2505.22617).

    They are those whose log-prob and advantage covary most, the field `high_covariance`: what they gain costs the most
    entropy. Their size of the log-ratio is weighed by `penalty`.
    """
    if not penalty >= 0:
        raise ConfigError(f"the kl_cov loss has penalty = {penalty}; it must be 0 or more")
    logarithm, chosen = _log_ratio(tokens), tokens["high_covariance"]
    ratio = _ratio(logarithm)
    per_token = -ratio * tokens["advantage"] + penalty * chosen * logarithm.abs()
    metrics = {
        "actor/pg_loss": per_token,
        "actor/covariance_frac": chosen,
        "actor/ppo_kl": -logarithm,
        "actor/ratio": ratio,
    }
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def vespo(
    tokens: Tokens,
    power: NonNegative = 2.0,
    decay: NonNegative = 3.0,
    power_negative: NonNegative = 3.0,
    decay_negative: NonNegative = 2.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """VESPO: the policy gradient weighed by a smooth function of the ratio w of a response (arXiv 2602.10693).

    w^power · exp(decay (1 − w)), without gradient, with parameters of their own where the advantage is negative: 1 if
    w is 1, and 0 far from it on both sides, so that nothing is clipped.
    """
    for name, value in (
        ("power", power),
        ("decay", decay),
        ("power_negative", power_negative),
        ("decay_negative", decay_negative),
    ):
        if not value >= 0:
            raise ConfigError(f"the vespo loss has {name} = {value}; it must be 0 or more")
    advantage = tokens["advantage"]
    total = tokens.sum_per_sample(_log_ratio(tokens).detach().clamp(-MAX_SUMMAND, MAX_SUMMAND))
    logarithm = tokens.expand(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    positive = advantage >= 0
    powers, decays = torch.where(positive, power, power_negative), torch.where(positive, decay, decay_negative)
    weight = (powers * logarithm + decays * (1 - logarithm.exp())).exp()
    per_token = -weight * advantage * tokens.logprobs
    metrics = {
        "actor/pg_loss": per_token,
        "actor/ppo_kl": -_log_ratio(tokens),
        "actor/ratio": logarithm.exp(),
        "actor/ratio_weight": weight,
    }
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def reinforce(
    tokens: Tokens,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """Returns the plain policy gradient, without ratio and clip, for tokens that the current weights generated."""
    per_token = -tokens["advantage"] * tokens.logprobs
    return with_kl_and_entropy(tokens, per_token, {"actor/pg_loss": per_token}, kl, kl_estimator, entropy, kl_unbiased)


def gkd(
    tokens: Tokens,
    divergence: Divergence = "reverse",
    beta: Fraction = 0.5,
    task: NonNegative = 0.0,
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """Returns the divergence from a teacher at each token, over the teacher's likeliest ones (arXiv 2306.13649).

    Reads `teacher_top_ids` and `teacher_top_logprobs`; see distflow.algo.distillation. `task` weighs the loss `policy`,
    which is added, for the field `advantage`.
    """
    if tokens.top is None:
        raise MissingFieldError("teacher_top_logprobs", [*tokens.per_token, *tokens.per_sample])
    if not task >= 0:
        raise ConfigError(f"the gkd loss has task = {task}; it must be 0 or more")
    per_token = divergence_from_teacher(divergence, tokens.top.student, tokens.top.teacher, beta)
    metrics = {"distill/divergence": per_token}
    if task:
        reward = policy(tokens)
        per_token, metrics = per_token + task * reward.per_token, {**reward.metrics, **metrics}
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy, kl_unbiased)


def value(tokens: Tokens, clip: NonNegative | None = None) -> Loss:
    """The loss of a critic: half the squared error of `values`. Reads `returns`, and `old_values` if there is a clip.

    With `clip` it is the larger of this error and the error of the value clipped to `old_values` ± clip.
    """
    values, returns = tokens.values, tokens["returns"]
    per_token = unclipped = (values - returns).square() / 2
    if clip is not None:
        if not clip >= 0:
            raise ConfigError(f"the value loss has clip = {clip}; it must be 0 or more")
        old = tokens["old_values"]
        per_token = torch.maximum(unclipped, (values.clamp(old - clip, old + clip) - returns).square() / 2)
    metrics = {
        "critic/vf_loss": per_token,
        "critic/clip_frac": (per_token > unclipped).to(unclipped.dtype),
        "critic/value": values,
    }
    return Loss(per_token, {name: values.detach() for name, values in metrics.items()})


def _log_ratio(tokens: Tokens) -> Tensor:
    """Returns the log of the ratio of the new policy to the old one; 0 if there are no `old_logprobs`."""
    old = tokens["old_logprobs"] if "old_logprobs" in tokens else tokens.logprobs.detach()
    return log_ratio(tokens.logprobs, old)


def _ratio(logarithm: Tensor) -> Tensor:
    return logarithm.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clips(loss: str, clip: float, clip_high: float | None) -> tuple[float, float]:
    """Returns both clips of a loss; the upper one is by default the lower one."""
    for name, value in (("clip", clip), ("clip_high", clip_high)):
        if value is not None and not value >= 0:
            raise ConfigError(f"the {loss} loss has {name} = {value}; it must be 0 or more")
    return clip, clip if clip_high is None else clip_high


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    below, above = _clips("policy", clip, clip_high)
    return max(0.0, 1 - below), 1 + above


def _clipped(
    tokens: Tokens, ratio: Tensor, bounds: tuple[float, float] | tuple[Tensor, Tensor], dual_clip: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns PPO's loss, the larger of the losses with the ratio and the clipped ratio, and its metrics."""
    if dual_clip and not dual_clip > 1:
        raise ConfigError(f"the policy loss has dual_clip = {dual_clip}; it must be above 1, or 0 for no bound")
    advantage = tokens["advantage"]
    unclipped, clipped = -ratio * advantage, -ratio.clamp(*bounds) * advantage
    per_token = torch.maximum(unclipped, clipped)
    bound = -(dual_clip or math.inf) * advantage
    beyond = (advantage < 0) & (per_token > bound)
    per_token = torch.where(beyond, bound, per_token)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > unclipped).to(ratio.dtype),
        "actor/dual_clip_frac": beyond.to(ratio.dtype),
        "actor/ppo_kl": -_log_ratio(tokens),
        "actor/ratio": ratio,
    }
    return per_token, metrics


def with_kl_and_entropy(
    tokens: Tokens,
    per_token: Tensor,
    metrics: Mapping[str, Tensor],
    kl: NonNegative = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
    kl_unbiased: bool = False,
) -> Loss:
    """Adds the KL divergence from the reference model and the entropy bonus to the loss of a policy.

    A custom loss ends with it: `def my_loss(tokens, **rest): …; return with_kl_and_entropy(tokens, per_token, metrics,
    **rest)`. A field `kl_weight`, which a controller writes, multiplies `kl`. `kl_unbiased` multiplies the divergence
    by the importance ratio, as the tokens are from the old policy.
    """
    logged = dict(metrics)
    regularizer: Tensor | None = None
    if not kl >= 0:
        raise ConfigError(f"the policy loss has kl = {kl}; it must be 0 or more")
    if kl > 0:
        divergence = kl_estimate(kl_estimator, tokens.logprobs, tokens["ref_logprobs"])
        if kl_unbiased:
            divergence = _ratio(_log_ratio(tokens)) * divergence
        regularizer = (kl * tokens["kl_weight"] if "kl_weight" in tokens else kl) * divergence
        logged["actor/kl"] = divergence
    if tokens.entropy is not None:
        logged["actor/entropy"] = tokens.entropy
    if entropy:
        if tokens.entropy is None:
            raise ConfigError(f"the policy loss has entropy = {entropy}, but the model computes none; set entropy to 0")
        bonus = entropy * tokens.entropy
        regularizer = -bonus if regularizer is None else regularizer - bonus
    total = per_token if regularizer is None else per_token + regularizer
    return Loss(total, {name: values.detach() for name, values in logged.items()}, regularizer)
