"""The order of samples as a pure function: any worker computes any part of a shuffle without holding the rest."""

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_WORD = (1 << 64) - 1

_Words = npt.NDArray[np.uint64]


def permute(index: npt.NDArray[np.int64], n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where the shuffle of `range(n)` keyed by (seed, epoch) sends each index; memory does not grow with `n`."""
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise IndexError(f"indices {index.min()}…{index.max()} are not all in range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = mix(mix(mix(_words(seed)) + _words(epoch)) + _words(*range(_ROUNDS)))
    x = _encrypt(index.astype(np.uint64), half, keys)
    # The cipher permutes range(4**half). Following a cycle from inside range(n) until it is inside again permutes
    # range(n), and always ends; 4**half < 4 * n for n > 1, so it takes four steps on average at most.
    while (outside := np.flatnonzero(x >= n)).size:
        x[outside] = _encrypt(x[outside], half, keys)
    return x.astype(np.int64)


def _encrypt(x: _Words, half: int, keys: _Words) -> _Words:
    """A Feistel network on words of 2 × half bits: a bijection whatever the round function is."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:  # added, not xor-ed: with xor some permutations of range(5) and range(6) come too often
        left, right = right, (left + mix(right + key)) & mask
    return left << shift | right


def mix(x: _Words) -> _Words:
    """One step of SplitMix64: every bit of the input changes each bit of the output with probability one half."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _words(*values: int) -> _Words:
    return np.array([v & _WORD for v in values], dtype=np.uint64)  # arrays wrap around silently, scalars warn
