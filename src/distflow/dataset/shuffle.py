"""A shuffle as a pure function: any worker computes any part of the order without storing the rest."""

import numpy as np
import numpy.typing as npt

from distflow.util.seeds import mix

_ROUNDS = 8
_WORD = (1 << 64) - 1

_Words = npt.NDArray[np.uint64]


def permute(index: npt.NDArray[np.int64], n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns the image of each index under the permutation of `range(n)` that (seed, epoch) selects.

    Memory does not grow with `n`.
    """
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise IndexError(f"indices {index.min()}…{index.max()} are not all in range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = mix(mix(mix(_words(seed)) + _words(epoch)) + _words(*range(_ROUNDS)))
    x = _encrypt(index.astype(np.uint64), half, keys)
    # The cipher permutes range(4**half). Following a cycle from inside range(n) until it is inside again permutes
    # range(n), and always ends; 4**half < 4 * n for n > 1, so it takes at most four steps on average.
    while (outside := np.flatnonzero(x >= n)).size:
        x[outside] = _encrypt(x[outside], half, keys)
    return x.astype(np.int64)


def _encrypt(x: _Words, half: int, keys: _Words) -> _Words:
    """Applies a Feistel network to words of 2 × half bits: a bijection for any round function."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:  # addition, as xor favours some permutations of range(5) and range(6)
        left, right = right, (left + mix(right + key)) & mask
    return left << shift | right


def _words(*values: int) -> _Words:
    return np.array([v & _WORD for v in values], dtype=np.uint64)  # arrays wrap around silently, scalars warn
