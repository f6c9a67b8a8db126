"""Everything that exists only because a CPU is slow: kernels compiled by numba, and ways around small operations.

Whatever is computed here gives the same bits for a token whatever other tokens are computed with it, in whatever number
of threads: so a rollout and a trainer agree to the bit. Kernels are for float32 and need the extra `cpu`; the functions
here return them, or None for other tensors.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.float32]
_PART = 1 << 21  # multiplications that are worth a thread


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Returns `cpu.kernels` if it can work on tensors like these."""
    fits = all(type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.dtype == torch.float32 for t in tensors)
    return _kernels() if fits else None


def as_numpy(x: Tensor) -> Floats:
    """Returns the same memory as a numpy array. After `x.numpy()` FSDP could not free it."""
    return cast(Floats, np.from_dlpack(x.detach()))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(kernel: Callable[[slice], None], count: int, work: int) -> None:
    """Calls `kernel` for parts of `count` in as many threads as torch may use here, if there is work for them: so many
    multiplications in all."""
    parts = min(torch.get_num_threads(), count, work // _PART)
    if parts <= 1:
        kernel(slice(0, count))
    else:
        bounds = [count * i // parts for i in range(parts + 1)]
        list(_pool(os.getpid()).map(kernel, map(slice, bounds, bounds[1:])))


def by_rows(kernel: Callable[..., None], cost: int, *tensors: Tensor) -> None:
    """Calls `kernel` for rows of the tensors. `cost`: of an element of the first, in multiplications."""
    arrays = [as_numpy(t) for t in tensors]
    in_threads(lambda some: kernel(*(a[some] for a in arrays)), len(arrays[0]), cost * arrays[0].size)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process; a fork of it has none of them."""
    return ThreadPoolExecutor(os.cpu_count(), "kernel")


def prefers_transposed(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a weight [out, in] should lie transposed: MKL multiplies a few rows faster so; kernels repack."""
    return device.type == "cpu" and not (dtype == torch.float32 and _kernels())


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("distflow.cpu.kernels")
    except (ImportError, RuntimeError):  # no numba, one that does not know this numpy, or nowhere to cache its work
        return None
