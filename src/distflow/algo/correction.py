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
from distflow.algo.options import CorrectionKind
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

        Where both log-probs agree, the weight is exactly 1.
        """
        tokens = Tokens(logprobs, lengths, {"rollout_logprobs": rollout_logprobs})
        x = log_ratio(logprobs.double(), rollout_logprobs.double()).clamp(-MAX_SUMMAND, MAX_SUMMAND)
        if self.kind.endswith("sequence"):
            total = tokens.sum_per_sample(x)
            x = tokens.expand(total / lengths.clamp(min=1) if self.kind == "mask-sequence" else total)
        clamps = self.kind in ("token", "sequence")
        lower = (0.0 if clamps else 1 / self.threshold) if self.lower is None else self.lower
        outside = (x > math.log(self.threshold)) | (x < (math.log(lower) if lower else -math.inf))
        ratio = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if clamps:
            weights = ratio.clamp(lower, self.threshold)
        else:
            weights = torch.where(outside, 0.0, 1.0 if self.kind.startswith("mask") else ratio)
        weights = weights.to(logprobs.dtype)
        return weights, {"rollout/correction": weights, "rollout/corrected_frac": outside.to(logprobs.dtype)}
