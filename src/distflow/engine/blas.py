"""Who multiplies with a matrix in the rollout engine."""

import os
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear


class Matrix(Protocol):
    """A linear layer, [in] to [out]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        """The same, but added to what is in `to` already."""
        ...


class ByTorch:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        return to.addmm_(x, self.weight.T) if self.bias is None else to.add_(self(x))


class ByNumpy:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.columns = weight.detach().numpy().T  # the same memory

    def __call__(self, x: Tensor) -> Tensor:
        made = torch.from_numpy(np.matmul(x.numpy(), self.columns))
        return made if self.bias is None else made.add_(self.bias)

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        return to.add_(self(x))


def matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """For this thread, by whoever is better at it; `weight` [out, in] may change as long as it stays in place.

    torch's MKL is made for Intel's CPUs: on AMD's, numpy's OpenBLAS takes a tenth less time for the few rows of
    decoding. How many threads it uses is settled when it is loaded; it is asked where one is right.
    """
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    alone = torch.get_num_threads() == 1 and _threads_of_numpy() == "1"
    return ByNumpy(weight, bias) if plain and alone and _by_amd() else ByTorch(weight, bias)


def _threads_of_numpy() -> str | None:
    return os.environ.get("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))


@cache
def _by_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
