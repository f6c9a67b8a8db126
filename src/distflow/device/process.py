"""Settings of a worker's process for its device: time limits, memory allocator, precision of products."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How long workers may wait for each other before the first step: they do not load alike. On an accelerator they read
# large models, compile and capture.
START_LIMIT_S, DEVICE_START_LIMIT_S = 300.0, 1800.0
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # where a user sets it up


def start_limit_s(device_type: str) -> float:
    return START_LIMIT_S if device_type == "cpu" else DEVICE_START_LIMIT_S


def sets_allocator(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the user has set up torch's allocator."""
    return any(environ.get(name) for name in _ALLOCATOR)


@dataclass(frozen=True)
class ProcessSettings:
    """The choices for the process; the defaults are torch's."""

    expandable_segments: bool = False
    tf32: bool = False

    def apply(self) -> None:
        """Sets it, before a model is on the device."""
        import torch

        if self.expandable_segments:
            lib: Any = torch._C
            lib._accelerator_setAllocatorSettings("expandable_segments:True")
        if self.tf32:
            torch.set_float32_matmul_precision("high")
