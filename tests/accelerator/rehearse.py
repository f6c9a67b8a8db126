"""Processes whose torch has an accelerator: the rehearsal's device, or the one that DISTFLOW_TEST_DEVICE names."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warm
from accelerator import races, rehearsal_device
from spawn import spawn

DEVICE = os.environ.get("DISTFLOW_TEST_DEVICE", rehearsal_device.NAME)
REHEARSED = DEVICE == rehearsal_device.NAME


def rehearse(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls fn(rank, *args) on each of n workers and returns their results, by rank."""
    if DEVICE not in (rehearsal_device.NAME, "cpu") and n > torch.accelerator.device_count():
        pytest.skip(f"needs {n} devices")
    with tempfile.TemporaryDirectory() as folder:
        return spawn(n, _with_device, n, (Path(folder) / "store").as_uri(), fn, args, timeout_s=300)


def _with_device(rank: int, n: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if REHEARSED:
        rehearsal_device.device()
    elif DEVICE != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.destroy_process_group()  # it was made for CPU tensors only
    backend = f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}" if DEVICE != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=n)
    result = fn(rank, *args)
    races.check()
    return result


def run_on_device(path: Path, *overrides: str, **options: Any) -> warm.Ended:
    """Does what `warm.distflow_run` does, on the device."""
    return warm.distflow_run(path, *overrides, main=_main, **options)


def _main(words: list[str]) -> None:
    if REHEARSED:
        rehearsal_device.device()
    try:
        warm.cli_main(words)
    finally:
        races.check()


def run_on_cpu(path: Path, *overrides: str, **options: Any) -> warm.Ended:
    """Does what `warm.distflow_run` does, without any accelerator."""
    return warm.distflow_run(path, *overrides, main=_main_without, **options)


def _main_without(words: list[str]) -> None:
    torch.accelerator.is_available = lambda: False
    warm.cli_main(words)
