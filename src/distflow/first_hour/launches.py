"""Kernels of a decoding step of the built-in engine: predicted on tensors without memory, and counted on the device."""

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distflow.cluster.world import own_device
from distflow.comm.streams import finish
from distflow.config.model_shape import ModelShape
from distflow.rehearsal.launches import DecodingStep

_REPEATS = 10
_NO_KERNELS = ("Memcpy", "Memset")


def answer(shape: dict[str, Any], sequences: int, longest: int) -> dict[str, Any]:
    """Returns kernels, predicted and counted, and the seconds of a step: those of the host, and until all is done."""
    model, device = ModelShape(**shape), own_device()
    predicted = DecodingStep(model, sequences, longest).launches().total
    step = DecodingStep(model, sequences, longest, device)
    if device.type == "cuda":
        step.run()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step.run()
            finish(device)
        found = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
        counted = sum(not e.name.startswith(_NO_KERNELS) for e in found)
    else:
        counted = step.launches().total
    finish(device)
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        step.run()
    asked = time.perf_counter()
    finish(device)
    done = time.perf_counter()
    return {
        "kernels": {"predicted": predicted, "measured": counted},
        "host_s": (asked - begun) / _REPEATS,
        "step_s": (done - begun) / _REPEATS,
    }
