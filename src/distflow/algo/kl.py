"""Estimators of KL(policy‖reference) from the log-probs of tokens that the policy sampled."""

import math
from typing import get_args

import torch
from torch import Tensor

from distflow.algo.options import Estimator
from distflow.errors import ConfigError, suggest

MAX_SLOPE = 20.0  # of k3, at a ratio of 21, where its value is 17


def kl(estimator: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns k1 = x, k2 = x²/2 or k3 = e^−x − 1 + x, where x = logprobs − ref_logprobs: [tokens].

    k1 and k3 are unbiased, k2 and k3 never negative. As a term of a loss use k2 or k3: the gradient of k1 is the
    gradient of logprobs, whatever the reference. Where the reference finds a token more than 21 times as likely, k3
    goes on as a line and is lower than unbiased: its gradient is at most 20, and never 0. `k3+` has the value of k3 and
    the gradient of k2, which on-policy is that of the divergence.
    """
    x = log_ratio(logprobs, ref_logprobs)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return k3(-x)
        case "k3+":
            k2 = x.square() / 2
            return k2 + (k3(-x) - k2).detach()
    raise ConfigError(f"unknown KL estimator '{estimator}'{suggest(estimator, get_args(Estimator))}")


def k3(y: Tensor, max_slope: float = MAX_SLOPE) -> Tensor:
    """Returns e^y − 1 − y, and its tangent from where the slope is `max_slope`."""
    knee = math.log1p(max_slope)
    bounded = y.clamp(max=knee)
    return bounded.expm1() - bounded + max_slope * (y - knee).relu()


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Returns logprobs − other: [tokens]. Where both are minus infinity they agree: 0, not NaN."""
    return torch.where(logprobs.isneginf() & other.isneginf(), 0.0, logprobs - other)
