"""Losses per token. What a token weighs in the loss of the step is for `aggregate` to say."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distflow.algo.kl import Kind
from distflow.algo.kl import kl as kl_estimate
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError

MAX_LOG_RATIO = 20.0  # beyond it e^x helps nobody; the ratio stays finite and its gradient is 0


@dataclass(frozen=True)
class Loss:
    """What the training engine multiplies by token weights, sums, and differentiates; metrics only for the log."""

    per_token: Tensor  # [tokens]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [tokens] each, detached


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
    for name, value in (("clip", clip), ("clip_high", clip_high), ("kl", kl)):
        if value is not None and not value >= 0:
            raise ConfigError(f"the policy loss has {name} = {value}; it must be 0 or more")
    new = tokens.logprobs  # [tokens]
    old = tokens["old_logprobs"] if "old_logprobs" in tokens else new.detach()
    advantage = tokens["advantage"]
    ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratio * advantage
    clipped = -ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * advantage
    per_token = torch.maximum(free, clipped)
    metrics = {
        "actor/pg_loss": per_token,
        "actor/clip_frac": (clipped > free).to(new.dtype),
        "actor/ppo_kl": old - new,
        "actor/ratio": ratio,
    }
    if kl > 0:
        divergence = kl_estimate(kl_kind, new, tokens["ref_logprobs"])
        per_token = per_token + kl * divergence
        metrics["actor/kl"] = divergence
    if tokens.entropy is not None:
        metrics["actor/entropy"] = tokens.entropy
    if entropy:
        if tokens.entropy is None:
            raise ConfigError(f"the policy loss has entropy = {entropy}, but no entropy was computed for it")
        per_token = per_token - entropy * tokens.entropy
    return Loss(per_token, {name: values.detach() for name, values in metrics.items()})
