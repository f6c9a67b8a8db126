"""Losses per token. What a token weighs in the loss of the step is for `aggregate` to say.

A flow names a loss by its name in here: those of pairs, which are written next door, too.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distflow.algo.kl import Kind
from distflow.algo.kl import kl as kl_estimate
from distflow.algo.preferences import dpo, preference
from distflow.algo.tokens import Loss, Tokens
from distflow.errors import ConfigError

__all__ = ["Loss", "cispo", "cpgd", "dpo", "finish", "gspo", "nll", "policy", "preference", "reinforce", "value"]

MAX_LOG_RATIO = 20.0  # beyond it e^x helps nobody; the ratio stays finite and its gradient is 0
MAX_DRIFT = 2.0  # how hard a token can be pulled back to the old policy, however far it has gone


def nll(tokens: Tokens) -> Loss:
    """Negative log-likelihood: supervised fine-tuning."""
    return Loss(-tokens.logprobs)


def policy(
    tokens: Tokens,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    kl_kind: Kind = "k3",
    entropy: float = 0.0,
) -> Loss:
    """PPO's clipped objective, with a ratio per token. Reads `advantage`, `old_logprobs`, and `ref_logprobs` if kl > 0.

    Without a field `old_logprobs` the tokens count as drawn by these very weights: the ratio is 1, and the gradient
    that of the policy. `clip` bounds the ratio to 1 − clip … 1 + clip_high (`clip` if not given). `entropy` is a bonus.
    """
    ratio = _log_ratio(tokens).exp()
    return finish(tokens, *_clipped(tokens, ratio, clip, clip_high), kl, kl_kind, entropy)


def gspo(
    tokens: Tokens,
    clip: float = 3e-4,
    clip_high: float | None = 4e-4,
    kl: float = 0.0,
    kl_kind: Kind = "k3",
    entropy: float = 0.0,
) -> Loss:
    """GSPO: as `policy`, with one ratio per response, the geometric mean of its tokens' (arXiv 2507.18071).

    Its value is that of the response, its gradient at each token that of the token: with every token of a response
    weighing the same, the sum is the gradient of the mean.
    """
    log_ratio = _log_ratio(tokens)
    mean = tokens.spread(tokens.sums(log_ratio.detach()) / tokens.lengths.clamp(min=1))
    ratio = (mean + tokens.logprobs - tokens.logprobs.detach()).exp()
    return finish(tokens, *_clipped(tokens, ratio, clip, clip_high), kl, kl_kind, entropy)


def cispo(
    tokens: Tokens,
    clip: float = 1.0,
    clip_high: float | None = 0.2,
    kl: float = 0.0,
    kl_kind: Kind = "k3",
    entropy: float = 0.0,
) -> Loss:
    """CISPO: the ratio is clipped and then only a weight, so that every token keeps its gradient (arXiv 2506.13585)."""
    low, high = _bounds(clip, clip_high)
    ratio = _log_ratio(tokens).exp().detach()
    weight = ratio.clamp(low, high)
    per_token = -weight * tokens["advantage"] * tokens.logprobs
    metrics = {"actor/pg_loss": per_token, "actor/clip_frac": (weight != ratio).to(ratio.dtype), "actor/ratio": ratio}
    return finish(tokens, per_token, metrics, kl, kl_kind, entropy)


def cpgd(
    tokens: Tokens,
    clip: float = 0.2,
    clip_high: float | None = None,
    drift: float = 0.1,
    kl: float = 0.0,
    kl_kind: Kind = "k3",
    entropy: float = 0.0,
) -> Loss:
    """CPGD: the log of the ratio takes the ratio's place, and leaving the old policy costs `drift` (arXiv 2505.12504).

    A ratio far off then pulls no harder than one close by, and is pulled back by min(ratio − 1, 2) at most.
    """
    low, high = _bounds(clip, clip_high)
    log_ratio = _log_ratio(tokens)
    advantage = tokens["advantage"]
    free = -log_ratio * advantage
    clipped = -log_ratio.clamp(math.log(max(low, 1e-6)), math.log(high)) * advantage
    per_token = torch.maximum(free, clipped)
    # Of samples from the old policy, its divergence from the new one; beyond a ratio of 3 the tangent there.
    near = log_ratio.clamp(max=math.log1p(MAX_DRIFT))
    left = near.expm1() - near + MAX_DRIFT * (log_ratio - near)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > free).to(log_ratio.dtype),
        "actor/drift": left,
        "actor/ratio": log_ratio.exp(),
    }
    return finish(tokens, per_token + drift * left, metrics, kl, kl_kind, entropy)


def reinforce(tokens: Tokens, kl: float = 0.0, kl_kind: Kind = "k3", entropy: float = 0.0) -> Loss:
    """The policy gradient as it is, without ratio and clip: of tokens that these weights have drawn."""
    per_token = -tokens["advantage"] * tokens.logprobs
    return finish(tokens, per_token, {"actor/pg_loss": per_token}, kl, kl_kind, entropy)


def value(tokens: Tokens, clip: float | None = None) -> Loss:
    """Of a critic: half the squared distance of `values` from the field `returns`.

    With `clip`, also that of the value moved from the field `old_values` by no more than `clip`; the larger counts.
    """
    values, returns = tokens.values, tokens["returns"]
    per_token = free = (values - returns).square() / 2
    if clip is not None:
        if not clip >= 0:
            raise ConfigError(f"the value loss has clip = {clip}; it must be 0 or more")
        old = tokens["old_values"]
        per_token = torch.maximum(free, (values.clamp(old - clip, old + clip) - returns).square() / 2)
    metrics = {
        "critic/vf_loss": per_token,
        "critic/clip_frac": (per_token > free).to(free.dtype),
        "critic/value": values,
    }
    return Loss(per_token, {name: told.detach() for name, told in metrics.items()})


def _old(tokens: Tokens) -> Tensor:
    return tokens["old_logprobs"] if "old_logprobs" in tokens else tokens.logprobs.detach()


def _log_ratio(tokens: Tokens) -> Tensor:
    """Of the new policy over the old one; 0 where there is no old one."""
    return (tokens.logprobs - _old(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _bounds(clip: float, clip_high: float | None) -> tuple[float, float]:
    for name, value in (("clip", clip), ("clip_high", clip_high)):
        if value is not None and not value >= 0:
            raise ConfigError(f"the policy loss has {name} = {value}; it must be 0 or more")
    return max(0.0, 1 - clip), 1 + (clip if clip_high is None else clip_high)


def _clipped(
    tokens: Tokens, ratio: Tensor, clip: float, clip_high: float | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's pessimistic choice between the ratio and its clipped self."""
    low, high = _bounds(clip, clip_high)
    advantage = tokens["advantage"]
    free, clipped = -ratio * advantage, -ratio.clamp(low, high) * advantage
    per_token = torch.maximum(free, clipped)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > free).to(ratio.dtype),
        "actor/ppo_kl": _old(tokens) - tokens.logprobs,
        "actor/ratio": ratio,
    }
    return per_token, metrics


def finish(
    tokens: Tokens,
    per_token: Tensor,
    metrics: Mapping[str, Tensor],
    kl: float = 0.0,
    kl_kind: Kind = "k3",
    entropy: float = 0.0,
) -> Loss:
    """What any loss of a policy may be given on top: a divergence from the reference model, a bonus for entropy.

    A loss of one's own ends in it: `def mine(tokens, **rest): …; return finish(tokens, per_token, metrics, **rest)`.
    A field `kl_weight`, which a controller writes, multiplies the weight of the divergence.
    """
    told = dict(metrics)
    if not kl >= 0:
        raise ConfigError(f"the policy loss has kl = {kl}; it must be 0 or more")
    if kl > 0:
        divergence = kl_estimate(kl_kind, tokens.logprobs, tokens["ref_logprobs"])
        weight = kl * tokens["kl_weight"] if "kl_weight" in tokens else kl
        per_token = per_token + weight * divergence
        told["actor/kl"] = divergence
    if tokens.entropy is not None:
        told["actor/entropy"] = tokens.entropy
    if entropy:
        if tokens.entropy is None:
            raise ConfigError(f"the policy loss has entropy = {entropy}, but no entropy was computed for it")
        per_token = per_token - entropy * tokens.entropy
    return Loss(per_token, {name: values.detach() for name, values in told.items()})
