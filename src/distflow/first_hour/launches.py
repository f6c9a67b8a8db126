"""Kernels of a decoding step of the built-in engine: predicted on tensors without memory, and counted on the device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distflow.cluster.world import own_device
from distflow.comm.streams import finish
from distflow.config.model_shape import ModelShape
from distflow.rehearsal.launches import DecodingStep
from distflow.rollout.builtin.decoding_graphs import WORTH, DecodingGraphs, can_record

_REPEATS = 10
_NO_KERNELS = ("Memcpy", "Memset")


def answer(shape: dict[str, Any], sequences: int, longest: int) -> dict[str, Any]:
    """Returns kernels, predicted and counted, and seconds of a step that is launched, and of one that is replayed."""
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
    found_times = {"launched": times(step.run, device)}
    if can_record(device):
        graphs = DecodingGraphs(step.forward.hidden, step.cache, device)
        tokens = torch.zeros(sequences, dtype=torch.int64)

        def replay() -> None:
            with torch.inference_mode():
                hidden = graphs(tokens, step.places, step.tables)
                if hidden is not None:
                    step.forward.logits(hidden)

        for _ in range(WORTH + 1):
            replay()
        found_times["replayed"] = times(replay, device)
    return {"kernels": {"predicted": predicted, "measured": counted}, "seconds": found_times}


def times(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Returns the seconds until the host has asked for it, and until it is done."""
    finish(device)
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    asked = time.perf_counter()
    finish(device)
    done = time.perf_counter()
    return {"host": (asked - begun) / _REPEATS, "step": (done - begun) / _REPEATS}
