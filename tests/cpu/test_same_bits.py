"""Kernels give the same bits wherever their arrays lie, and whether they are just compiled or loaded from the cache."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distflow.cpu import kernels

_EPSILON, _FAR = np.float32(1e-6), 1 << 13
_draw = np.random.default_rng(0)


def _numbers(*shape: int) -> np.ndarray:
    return _draw.standard_normal(shape, np.float32)


def _words(*shape: int) -> np.ndarray:
    return _draw.integers(0, 1 << 32, shape, np.uint32)


def _norm(x: Any, weight: Any, out: Any) -> None:
    kernels.norm(x, weight, _EPSILON, out)


def _norm_backward(d: Any, x: Any, weight: Any, dx: Any, dw: Any) -> None:
    kernels.norm_backward(d, x, weight, _EPSILON, dx, dw)


def _multiply(a: Any, b: Any, out: Any) -> None:
    kernels.multiply(a, b.T, out, False)


def _cases() -> list[Any]:
    cases = []
    for n, dim in ((1, 16), (1, 258), (2, 40), (15, 32), (15, 86), (3, 300)):
        rows, row, numbers = (n, dim), (dim,), (n,)
        targets = _draw.integers(0, dim, n)
        calls: dict[str, tuple[Callable[..., None], list[np.ndarray]]] = {
            "norm": (_norm, [_numbers(*s) for s in (rows, row, rows)]),
            "norm_backward": (_norm_backward, [_numbers(*s) for s in (rows, rows, row, rows, row)]),
            "multiply": (_multiply, [_numbers(*s) for s in (rows, (19, dim), (n, 19))]),
            "gate": (kernels.gate, [_numbers(*rows) for _ in range(3)]),
            "gate_backward": (kernels.gate_backward, [_numbers(*rows) for _ in range(5)]),
            "token_logprobs": (
                kernels.token_logprobs,
                [_numbers(*rows), targets, _numbers(*numbers), _numbers(*numbers)],
            ),
            "token_logprobs_backward": (
                kernels.token_logprobs_backward,
                [_numbers(*rows), targets, _numbers(*numbers), _numbers(*numbers)],
            ),
            "gumbel_sample": (
                kernels.gumbel_sample,
                [_numbers(*rows), _words(n, 2), _words(dim), _numbers(dim), targets.copy()],
            ),
        }
        cases += [pytest.param(*call, id=f"{name}-{n}x{dim}") for name, call in calls.items()]
    return cases


def _placed(arrays: list[np.ndarray], order: list[int], gaps: list[int]) -> list[np.ndarray]:
    """Copies arrays into one block of memory, in this order, with gaps of so many bytes before them."""
    memory = np.empty(sum(a.nbytes + 8 for a in arrays) + sum(gaps) + 64, np.uint8)
    copies: dict[int, np.ndarray] = {}
    at = -memory.ctypes.data % 64
    for i, gap in zip(order, gaps, strict=True):
        size = arrays[i].itemsize
        at += gap + -(at + gap) % size
        copies[i] = memory[at : at + arrays[i].nbytes].view(arrays[i].dtype).reshape(arrays[i].shape)
        copies[i][...] = arrays[i]
        at += arrays[i].nbytes
    return [copies[i] for i in range(len(arrays))]


@pytest.mark.parametrize(("kernel", "arrays"), _cases())
def test_the_addresses_of_arrays_change_no_bit(kernel: Callable[..., None], arrays: list[np.ndarray]) -> None:
    """A vectorised loop has a scalar version, which runs where arrays lie so close that they might overlap."""
    rng, everybody = random.Random(0), range(len(arrays))

    def output(order: list[int], gaps: list[int]) -> list[bytes]:
        placed = _placed(arrays, order, gaps)
        kernel(*placed)
        return [a.tobytes() for a in placed]

    apart = output(list(everybody), [_FAR for _ in everybody])
    for _ in range(100):
        order = rng.sample(everybody, len(arrays))
        gaps = rng.choices([0, 0, 0, 4, 8, 16, 32, 48, 64, 100, 124, _FAR], k=len(arrays))
        assert output(order, gaps) == apart, f"order {order}, gaps {gaps}"


_PROGRAM = """
import hashlib
import numpy as np
from distflow.cpu import kernels

draw, digest = np.random.default_rng(0), hashlib.sha256()
for n, words in ((1, 128), (15, 86), (64, 258), (64, 1024)):
    logits = draw.standard_normal((n, words), np.float32)
    others = draw.integers(0, words, n), *draw.standard_normal((2, n), np.float32)
    kernels.token_logprobs(logits, *others)
    kernels.token_logprobs_backward(logits, *others)
    for array in (logits, *others):
        digest.update(array.tobytes())
print(digest.hexdigest(), sum(kernels.token_logprobs.stats.cache_hits.values()))
"""


def test_kernels_from_the_cache_give_the_bits_of_freshly_compiled_ones(tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        command, env = [sys.executable, "-c", _PROGRAM], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    (compiled, no_hits), (cached, hits) = outputs
    assert (no_hits, hits) == ("0", "1")
    assert compiled == cached
