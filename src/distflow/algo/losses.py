"""Losses per token, which flows call by their names in this module. `aggregate` makes one loss of them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distflow.algo.kl import Estimator
from distflow.algo.kl import kl as kl_estimate
from distflow.algo.preferences import dpo, preference
from distflow.algo.tokens import Loss, Tokens
from distflow.errors import ConfigError

__all__ = [
    "Loss",
    "cispo",
    "cpgd",
    "dpo",
    "gspo",
    "nll",
    "policy",
    "preference",
    "reinforce",
    "value",
    "with_kl_and_entropy",
]

MAX_LOG_RATIO = 20.0  # keeps the ratio finite; beyond it the gradient is 0
MAX_DRIFT = 2.0  # bounds the gradient of the drift penalty of a token


def nll(tokens: Tokens) -> Loss:
    """The negative log-likelihood, for supervised fine-tuning."""
    return Loss(-tokens.logprobs)


def policy(
    tokens: Tokens,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
) -> Loss:
    """PPO's clipped objective, with a ratio per token. Reads `advantage`, `old_logprobs`, and `ref_logprobs` if kl > 0.

    `clip` bounds the ratio to 1 − clip … 1 + clip_high (by default `clip`); `kl` and `entropy` are weights of the KL
    divergence and of the entropy bonus. Without a field `old_logprobs` the update is on-policy: the ratio is 1.
    """
    ratio = _log_ratio(tokens).exp()
    return with_kl_and_entropy(tokens, *_clipped(tokens, ratio, clip, clip_high), kl, kl_estimator, entropy)


def gspo(
    tokens: Tokens,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
) -> Loss:
    """GSPO: `policy` with one ratio per response, the geometric mean of its tokens' (arXiv 2507.18071).

    Each token has the value of the response's ratio and the gradient of its own: if all tokens of a response weigh the
    same, these add up to the gradient of the response's ratio.
    """
    log_ratio = _log_ratio(tokens)
    mean = tokens.expand(tokens.sum_per_sample(log_ratio.detach()) / tokens.lengths.clamp(min=1))
    ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
    return with_kl_and_entropy(tokens, *_clipped(tokens, ratio, clip, clip_high), kl, kl_estimator, entropy)


def cispo(
    tokens: Tokens,
    clip: float = 1.0,
    clip_high: float | None = 0.2,
    kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
) -> Loss:
    """CISPO: the clipped ratio is a weight without gradient, so that every token is trained (arXiv 2506.13585)."""
    low, high = _bounds(clip, clip_high)
    ratio = _log_ratio(tokens).exp().detach()
    weight = ratio.clamp(low, high)
    per_token = -weight * tokens["advantage"] * tokens.logprobs
    metrics = {"actor/pg_loss": per_token, "actor/clip_frac": (weight != ratio).to(ratio.dtype), "actor/ratio": ratio}
    return with_kl_and_entropy(tokens, per_token, metrics, kl, kl_estimator, entropy)


def cpgd(
    tokens: Tokens,
    clip: float = 0.2,
    clip_high: float | None = None,
    drift: float = 0.1,
    kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
) -> Loss:
    """CPGD: the log-ratio in place of the ratio, and a penalty of weight `drift` on policy drift (arXiv 2505.12504).

    The gradient of a token then does not grow with its ratio; that of its penalty is min(ratio − 1, 2).
    """
    low, high = _bounds(clip, clip_high)
    log_ratio = _log_ratio(tokens)
    advantage = tokens["advantage"]
    unclipped = -log_ratio * advantage
    clipped = -log_ratio.clamp(math.log(max(low, 1e-6)), math.log(high)) * advantage
    per_token = torch.maximum(unclipped, clipped)
    # The k3 estimate of KL(old‖new), as tokens are from the old policy; beyond a ratio of 3, its tangent.
    bounded = log_ratio.clamp(max=math.log1p(MAX_DRIFT))
    divergence = bounded.expm1() - bounded + MAX_DRIFT * (log_ratio - bounded)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > unclipped).to(log_ratio.dtype),
        "actor/drift": divergence,
        "actor/ratio": log_ratio.exp(),
    }
    return with_kl_and_entropy(tokens, per_token + drift * divergence, metrics, kl, kl_estimator, entropy)


def reinforce(tokens: Tokens, kl: float = 0.0, kl_estimator: Estimator = "k3", entropy: float = 0.0) -> Loss:
    """The plain policy gradient, without ratio and clip, for tokens that the current weights generated."""
    per_token = -tokens["advantage"] * tokens.logprobs
    return with_kl_and_entropy(tokens, per_token, {"actor/pg_loss": per_token}, kl, kl_estimator, entropy)


def value(tokens: Tokens, clip: float | None = None) -> Loss:
    """The loss of a critic: half the squared error of `values`. Reads `returns`, and `old_values` if there is a clip.

    With `clip` it is the larger of that and the error of the value clipped to `old_values` ± clip.
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


def _old_logprobs(tokens: Tokens) -> Tensor:
    return tokens["old_logprobs"] if "old_logprobs" in tokens else tokens.logprobs.detach()


def _log_ratio(tokens: Tokens) -> Tensor:
    """Returns the log of the ratio of the new policy to the old one; 0 if there are no `old_logprobs`."""
    return (tokens.logprobs - _old_logprobs(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    for name, value in (("clip", clip), ("clip_high", clip_high)):
        if value is not None and not value >= 0:
            raise ConfigError(f"the policy loss has {name} = {value}; it must be 0 or more")
    return max(0.0, 1 - clip), 1 + (clip if clip_high is None else clip_high)


def _clipped(
    tokens: Tokens, ratio: Tensor, clip: float, clip_high: float | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns PPO's loss, the larger of those with the ratio and with the clipped ratio, and its metrics."""
    low, high = _bounds(clip, clip_high)
    advantage = tokens["advantage"]
    unclipped, clipped = -ratio * advantage, -ratio.clamp(low, high) * advantage
    per_token = torch.maximum(unclipped, clipped)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > unclipped).to(ratio.dtype),
        "actor/ppo_kl": _old_logprobs(tokens) - tokens.logprobs,
        "actor/ratio": ratio,
    }
    return per_token, metrics


def with_kl_and_entropy(
    tokens: Tokens,
    per_token: Tensor,
    metrics: Mapping[str, Tensor],
    kl: float = 0.0,
    kl_estimator: Estimator = "k3",
    entropy: float = 0.0,
) -> Loss:
    """Adds the KL divergence from the reference model and the entropy bonus to the loss of a policy.

    A custom loss ends with it: `def my_loss(tokens, **rest): …; return with_kl_and_entropy(tokens, per_token, metrics,
    **rest)`. A field `kl_weight`, which a controller writes, multiplies `kl`.
    """
    logged = dict(metrics)
    if not kl >= 0:
        raise ConfigError(f"the policy loss has kl = {kl}; it must be 0 or more")
    if kl > 0:
        divergence = kl_estimate(kl_estimator, tokens.logprobs, tokens["ref_logprobs"])
        weight = kl * tokens["kl_weight"] if "kl_weight" in tokens else kl
        per_token = per_token + weight * divergence
        logged["actor/kl"] = divergence
    if tokens.entropy is not None:
        logged["actor/entropy"] = tokens.entropy
    if entropy:
        if tokens.entropy is None:
            raise ConfigError(f"the policy loss has entropy = {entropy}, but the model computes none; set entropy to 0")
        per_token = per_token - entropy * tokens.entropy
    return Loss(per_token, {name: values.detach() for name, values in logged.items()})
