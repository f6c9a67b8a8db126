"""A caching allocator for received bytes. Fresh memory is as slow as sending: its pages have to be faulted in first.

Tensors own the memory that they view. A node may keep such a tensor, or write it to another field: a block is reused
once the last tensor that views it is gone. There is no explicit release, as only the tensors know their readers.
"""

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def with_headroom(size: int) -> int:
    """Returns the bytes to allocate: a quarter more, as the next step often needs a few more.

    Pages that are never written to take no memory.
    """
    return size + size // 4


class CachingAllocator:
    """Keeps freed blocks for the next allocation, as PyTorch's own allocator does for GPUs but not for CPUs."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def empty(self, size: int) -> Tensor:
        """Returns `size` uninitialized bytes of host memory."""
        # Other threads may free blocks meanwhile, but only append to the list.
        fitting = [i for i, block in enumerate(self._free) if len(block) >= size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        else:
            self._free.clear()  # all are too small: give them back to the system
            block = np.empty(with_headroom(size), np.uint8)
        # torch refers to this array for as long as any tensor on its memory exists.
        owner = block[:size]
        weakref.finalize(owner, self._free.append, block).atexit = False
        return torch.from_numpy(owner)
