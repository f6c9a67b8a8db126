"""Weights that make up for the engine that generated not being quite the model that learns from it."""

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
    kind: Kind, logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor, limit: float = 2.0
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What the loss of each token is to be multiplied by, and metrics: [tokens] each, in the dtype of logprobs.

    From the ratios e^(logprobs − rollout_logprobs); where both agree, the weight is exactly 1.

    - token: the ratio of the token, at most `limit` (truncated importance sampling)
    - sequence: the ratio of the whole response, the product of its tokens', at most `limit`
    - mask-token: 1 where the ratio of the token is within 1/limit … limit, else 0
    - mask-sequence: 1 where the geometric mean of the response's ratios is, else 0
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"unknown correction of the rollout '{kind}'{suggest(kind, get_args(Kind))}")
    if not limit >= 1:
        raise ConfigError(f"the correction of the rollout has limit = {limit}; it must be 1 or more")
    tokens = Tokens(logprobs, lengths, {"rollout_logprobs": rollout_logprobs})
    # Minus infinity twice is agreement; and sums of what is beyond all bounds are to stay numbers.
    apart = torch.where(logprobs == rollout_logprobs, 0.0, logprobs.double() - rollout_logprobs.double())
    apart = apart.clamp(-1e30, 1e30)
    if kind == "sequence":
        apart = tokens.spread(tokens.sums(apart))
    elif kind == "mask-sequence":
        apart = tokens.spread(tokens.sums(apart) / lengths.clamp(min=1))
    if kind in ("token", "sequence"):
        corrected = apart > math.log(limit)
        weights = apart.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=limit)
    else:
        corrected = apart.abs() > math.log(limit)
        weights = (~corrected).double()
    weights = weights.to(logprobs.dtype)
    return weights, {"rollout/correction": weights, "rollout/corrected_frac": corrected.to(logprobs.dtype)}
