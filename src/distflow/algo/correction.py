"""Importance weights that correct for off-policy rollouts.

Rollouts are off-policy if the engine's numerics differ from the trainer's, or if its weights are older.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from distflow.algo.kl import log_ratio
from distflow.algo.losses import MAX_LOG_RATIO, MAX_SUMMAND
from distflow.algo.options import CorrectionKind, RejectionKind
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError, suggest


@dataclass(frozen=True)
class Correction:
    """Weighs the policy term of each token by a ratio e^(logprobs − rollout_logprobs), within lower … threshold.

    - token: the ratio of the token, clamped to the bounds (truncated importance sampling)
    - sequence: the ratio of the whole response, the product of its tokens', clamped to the bounds
    - mask-token: 1 if the ratio of the token is within the bounds, else 0
    - mask-sequence: 1 if the geometric mean of the response's ratios is, else 0
    - icepop-token: the ratio of the token if it is within the bounds, else 0
    - icepop-sequence: the ratio of the whole response if it is, else 0

    `lower` defaults to 0 for the kinds that clamp, and to 1/threshold for the others.
    """

    kind: CorrectionKind
    threshold: float = 2.0
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ConfigError(f"unknown rollout correction '{self.kind}'{suggest(self.kind, get_args(CorrectionKind))}")
        if not self.threshold >= 1:
            raise ConfigError(f"the rollout correction has threshold = {self.threshold}; it must be 1 or more")
        if self.lower is not None and not 0 <= self.lower <= 1:
            raise ConfigError(f"the rollout correction has lower = {self.lower}; it must be within 0 … 1")

    @torch.no_grad()
    def weights(
        self, logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the weight of each token, and metrics: [tokens] each, in the dtype of logprobs.

        Where both log-probs agree, the weight is exactly 1; where one of them is NaN, it is 0.
        """
        tokens = Tokens(logprobs, lengths, {"rollout_logprobs": rollout_logprobs})
        x = log_ratio(logprobs.double(), rollout_logprobs.double()).clamp(-MAX_SUMMAND, MAX_SUMMAND)
        if self.kind.endswith("sequence"):
            total = tokens.sum_per_sample(x)
            x = tokens.expand(total / lengths.clamp(min=1) if self.kind == "mask-sequence" else total)
        clamps = self.kind in ("token", "sequence")
        lower = (0.0 if clamps else 1 / self.threshold) if self.lower is None else self.lower
        within = (x <= math.log(self.threshold)) & (x >= (math.log(lower) if lower else -math.inf))  # NaN is not
        outside = ~within
        ratio = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if clamps:
            weights = ratio.clamp(lower, self.threshold).nan_to_num(0.0)
        else:
            weights = torch.where(outside, 0.0, 1.0 if self.kind.startswith("mask") else ratio)
        weights = weights.to(logprobs.dtype)
        return weights, {"rollout/correction": weights, "rollout/corrected_frac": outside.to(logprobs.dtype)}


@dataclass(frozen=True)
class Rejection:
    """Leaves out the policy term of tokens, or of whole responses, whose two log-probs are too far apart.

    A kind says of what, then how far: `token` of each token; `mean`, `sum` or `max` of the tokens of a response, which
    is then left out as a whole; `k1` the log-ratio logprobs − rollout_logprobs, which must be within ±log(threshold)
    (its size, for `max`); `k2` and `k3` the estimates of the divergence, which must be at most `threshold`.
    """

    kind: RejectionKind
    threshold: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(RejectionKind):
            raise ConfigError(f"unknown rollout rejection '{self.kind}'{suggest(self.kind, get_args(RejectionKind))}")
        lowest = 1 if self.kind.endswith("k1") else 0
        if not self.threshold >= lowest:
            raise ConfigError(
                f"the rollout rejection {self.kind} has threshold = {self.threshold}; it must be {lowest} or more"
            )

    @torch.no_grad()
    def weights(
        self, logprobs: Tensor, rollout_logprobs: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns 1 for tokens that are kept and 0 for the others, and metrics; NaN log-probs are not kept: [tokens]"""
        tokens = Tokens(logprobs, lengths, {"rollout_logprobs": rollout_logprobs})
        x = log_ratio(logprobs.double(), rollout_logprobs.double()).clamp(-MAX_SUMMAND, MAX_SUMMAND)
        span, _, measure = self.kind.partition("-")
        distance = {"k1": x, "k2": x.square() / 2, "k3": x.clamp(max=_MAX_EXPONENT).expm1() - x}[measure]
        if span == "max":
            distance = tokens.expand(tokens.max_per_sample(distance.abs()))
        elif span != "token":
            total = tokens.sum_per_sample(distance)
            distance = tokens.expand(total / lengths.clamp(min=1) if span == "mean" else total)
        bound = math.log(self.threshold) if measure == "k1" else self.threshold
        kept = (distance.abs() <= bound).to(logprobs.dtype)
        return kept, {"rollout/rejected_frac": 1 - kept}


_MAX_EXPONENT = 80.0  # keeps k3 finite
