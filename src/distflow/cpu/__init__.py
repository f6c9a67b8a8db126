"""Everything that exists only because a CPU is slow: kernels compiled by numba, and ways around small operations.

The functions here return the CPU kernels, or None on other devices. Kernels are for float32, in a thread that has
no other of torch's threads to help it (one worker per core), and need the extra `cpu`.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """Returns `cpu.kernels` if it can work on tensors like this one in this thread."""
    fits = tensor.is_cpu and tensor.dtype == torch.float32 and torch.get_num_threads() == 1
    return _kernels() if fits else None


def as_numpy(x: Tensor) -> NDArray[np.float32]:
    """Returns the same memory as a numpy array. After `x.numpy()` FSDP could not free it."""
    return cast(NDArray[np.float32], np.from_dlpack(x.detach()))


def prefers_transposed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a weight [out, in] should lie transposed: MKL multiplies a few rows with it faster. Kernels repack it."""
    return device.type == "cpu" and not (dtype == torch.float32 and _kernels())


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("distflow.cpu.kernels")
    except (ImportError, RuntimeError):  # no numba, one that does not know this numpy, or nowhere to cache its work
        return None
