"""Randomness that is a function of its arguments: equal on every worker, in every order."""

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]
_GAMMA, _FIRST, _SECOND, _30, _27, _31 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
)


def mix(x: _Words) -> _Words:
    """Applies one step of SplitMix64: each input bit flips each output bit with probability one half."""
    x = x + _GAMMA
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


def eval_seed(seed: int) -> int:
    """Returns the seed of the sampling noise of evaluation, which is not that of training."""
    return seed ^ 0x5EED
