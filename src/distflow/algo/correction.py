"""Importance weights that correct for the mismatch between the rollout engine and the trainer."""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from distflow.algo.losses import MAX_LOG_RATIO
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError, suggest

Kind = Literal["token", "sequence", "mask-token", "mask-sequence"]


@torch.no_grad()
def correction(
    kind: Kind, logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, threshold: float = 2.0
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the weight of each token's loss, and metrics: [tokens] each, in the dtype of logprobs.

    Weights are of the ratios e^(logprobs − rollout_logprobs); where both agree, the weight is exactly 1.

    - token: the ratio of the token, at most `threshold` (truncated importance sampling)
    - sequence: the ratio of the whole response, the product of its tokens', at most `threshold`
    - mask-token: 1 if the ratio of the token is within 1/threshold … threshold, else 0
    - mask-sequence: 1 if the geometric mean of the response's ratios is, else 0
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"unknown rollout correction '{kind}'{suggest(kind, get_args(Kind))}")
    if not threshold >= 1:
        raise ConfigError(f"the rollout correction has threshold = {threshold}; it must be 1 or more")
    tokens = Tokens(logprobs, lengths, {"rollout_logprobs": rollout_logprobs})
    # Minus infinity on both sides is agreement; the clamp keeps sums finite.
    log_ratio = torch.where(logprobs == rollout_logprobs, 0.0, logprobs.double() - rollout_logprobs.double())
    log_ratio = log_ratio.clamp(-1e30, 1e30)
    if kind == "sequence":
        log_ratio = tokens.expand(tokens.sum_per_sample(log_ratio))
    elif kind == "mask-sequence":
        log_ratio = tokens.expand(tokens.sum_per_sample(log_ratio) / lengths.clamp(min=1))
    if kind in ("token", "sequence"):
        corrected = log_ratio > math.log(threshold)
        weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=threshold)
    else:
        corrected = log_ratio.abs() > math.log(threshold)
        weights = (~corrected).double()
    weights = weights.to(logprobs.dtype)
    return weights, {"rollout/correction": weights, "rollout/corrected_frac": corrected.to(logprobs.dtype)}
