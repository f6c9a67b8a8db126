"""Estimators of KL(policy‖reference) from the log-probs of tokens that the policy sampled."""

from typing import Literal, get_args

from torch import Tensor

from distflow.errors import ConfigError, suggest

Estimator = Literal["k1", "k2", "k3"]

MAX_EXPONENT = 20.0  # e^20 is far beyond any use, yet far from the largest float32


def kl(estimator: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns k1 = x, k2 = x²/2 or k3 = e^−x − 1 + x, where x = logprobs − ref_logprobs: [tokens].

    k1 and k3 are unbiased, k2 and k3 never negative. As a term of a loss use k2 or k3: the gradient of k1 is that of
    logprobs alone, whatever the reference. Where −x > 20, k3 is constant and its gradient 0.
    """
    x = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            # Both terms are clamped: with only the exponent clamped, the other would push away from the reference.
            y = (-x).clamp(max=MAX_EXPONENT)
            return y.expm1() - y
    raise ConfigError(f"unknown KL estimator '{estimator}'{suggest(estimator, get_args(Estimator))}")
