"""Controllers of a weight: from what was measured in a step to the weight of the next."""

import math

from distflow.errors import ConfigError, DataError

MAX_ERROR = 0.2  # a step that is far off moves the weight no further than this one
MAX_EXPONENT = 20.0  # e^20 is far beyond any use


def adaptive_kl(weight: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """The weight of the divergence that holds it at `target` (Ziegler et al. 2019, arXiv 1909.08593).

    weight × (1 + error × samples / horizon), where the error is kl / target − 1 within ±0.2: being off by 20 % or more
    for `horizon` samples changes the weight by 20 %.
    """
    _check(weight, kl, target)
    if samples < 0:
        raise ConfigError(f"the controller of the KL weight is told of {samples} samples; there are 0 or more")
    if not horizon > MAX_ERROR * samples:
        raise ConfigError(
            f"the controller of the KL weight has horizon = {horizon}, with {samples} samples a step; it must be above"
            f" {MAX_ERROR * samples:g}, or one step could take the weight to 0"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return weight * (1 + error * samples / horizon)


def lagrange(weight: float, kl: float, target: float, rate: float) -> float:
    """The multiplier of the constraint kl ≤ target, by dual ascent: weight × e^(rate × (kl − target) / target).

    The step is taken in the logarithm of the weight, which so stays above 0, and can come back from anywhere.
    """
    _check(weight, kl, target)
    if not 0 <= rate < math.inf:
        raise ConfigError(f"the controller of the KL weight has rate = {rate}; it must be 0 or more")
    exponent = rate * (kl / target - 1)
    return weight * math.exp(min(max(exponent, -MAX_EXPONENT), MAX_EXPONENT))


def _check(weight: float, kl: float, target: float) -> None:
    for name, value in (("weight", weight), ("target", target)):
        if not value > 0:
            raise ConfigError(f"the controller of the KL weight has {name} = {value}; it must be above 0")
    if not math.isfinite(kl):
        raise DataError(f"the divergence measured is {kl}; no weight can be set from it")
