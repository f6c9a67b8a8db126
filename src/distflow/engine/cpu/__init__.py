"""What is done otherwise on a CPU."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def kernels_for(like: Tensor) -> ModuleType | None:
    """`kernels.py`, where it is of use: for numbers like these, in a thread that has no others of torch's to help it,
    with numba installed."""
    return _compiled() if _fits(like.dtype, like.device) and torch.get_num_threads() == 1 else None


def same(x: Tensor) -> NDArray[np.float32]:
    """The same memory for numpy; after `x.numpy()` FSDP could not free it."""
    return cast(NDArray[np.float32], np.from_dlpack(x.detach()))


def by_columns(dtype: torch.dtype, device: torch.device) -> bool:
    """How a matrix [out, in] had better lie: MKL multiplies a few rows with it faster so. Kernels re-lay it anyway."""
    return device.type == "cpu" and not (_fits(dtype, device) and _compiled())


def _fits(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype == torch.float32


@cache
def _compiled() -> ModuleType | None:
    try:
        return import_module("distflow.engine.cpu.kernels")
    except (ImportError, RuntimeError):  # no numba, or one that does not know this numpy, or nowhere to keep its work
        return None
