"""Controllers of the KL weight: they set the weight of a step by the divergence of the step before."""

import math

from distflow.errors import ConfigError, DataError

MAX_ERROR = 0.2  # larger errors change the weight no faster than this one
MAX_EXPONENT = 20.0  # e^20 is far beyond any useful change


def adaptive_kl_weight(weight: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """Returns the weight of the next step so that the divergence stays at `target` (arXiv 1909.08593).

    weight × (1 + error × samples / horizon), where the error is kl / target − 1 within ±0.2: being off by 20 % or more
    for `horizon` samples changes the weight by 20 %.
    """
    _check(weight, kl, target)
    if samples < 0:
        raise ConfigError(f"the KL controller got {samples} samples; pass 0 or more")
    if not horizon > MAX_ERROR * samples:
        raise ConfigError(
            f"the KL controller has horizon = {horizon}, with {samples} samples a step; it must be above"
            f" {MAX_ERROR * samples:g}, or one step could take the weight to 0"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return weight * (1 + error * samples / horizon)


def lagrangian_kl_weight(weight: float, kl: float, target: float, rate: float) -> float:
    """Returns the multiplier of the constraint kl ≤ target after a step of dual ascent in its logarithm.

    weight × e^(rate × (kl − target) / target): it stays above 0, and can recover from any value.
    """
    _check(weight, kl, target)
    if not 0 <= rate < math.inf:
        raise ConfigError(f"the KL controller has rate = {rate}; it must be 0 or more")
    exponent = rate * (kl / target - 1)
    return weight * math.exp(min(max(exponent, -MAX_EXPONENT), MAX_EXPONENT))


def _check(weight: float, kl: float, target: float) -> None:
    for name, value in (("weight", weight), ("target", target)):
        if not value > 0:
            raise ConfigError(f"the KL controller has {name} = {value}; it must be above 0")
    if not math.isfinite(kl):
        raise DataError(f"the KL divergence of the step is {kl}; no weight can be set from it")
