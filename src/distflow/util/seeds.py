"""Randomness that is a function of its arguments: equal on every worker, in every order."""

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]


def mix(x: _Words) -> _Words:
    """Applies one step of SplitMix64: each input bit flips each output bit with probability one half."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def eval_seed(seed: int) -> int:
    """Returns the seed of the sampling noise of evaluation, which is not that of training."""
    return seed ^ 0x5EED
