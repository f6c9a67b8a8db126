"""Estimates of KL(policy‖reference) from the log-probabilities of the tokens the policy drew."""

from typing import Literal, get_args

from torch import Tensor

from distflow.errors import ConfigError, suggest

Kind = Literal["k1", "k2", "k3"]

MAX_EXPONENT = 20.0  # e^20 is far beyond any use, yet far from the largest float32


def kl(kind: Kind, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[tokens], from x = logprobs − ref_logprobs: k1 = x, k2 = x²/2, k3 = e^−x − 1 + x.

    k1 and k3 are unbiased, k2 and k3 never negative. As a term of a loss take k2 or k3: the gradient of k1 is that
    of logprobs alone, whatever the reference says. k3 stays at its value, with gradient 0, where −x > 20.
    """
    x = logprobs - ref_logprobs
    match kind:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            # Both terms are clamped: were only the exponent, the rest would push away from the reference.
            y = (-x).clamp(max=MAX_EXPONENT)
            return y.expm1() - y
    raise ConfigError(f"unknown estimate of KL '{kind}'{suggest(kind, get_args(Kind))}")
