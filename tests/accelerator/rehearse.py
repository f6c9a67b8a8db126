"""Processes whose torch has the rehearsal's device as its accelerator."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warm
from spawn import spawn


def rehearse(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls fn(rank, *args) on each of n workers and returns their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        return spawn(n, _with_device, n, (Path(folder) / "store").as_uri(), fn, args, timeout_s=300)


def _with_device(rank: int, n: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    from accelerator.rehearsal_device import NAME, device

    device()
    dist.destroy_process_group()  # it was made for CPU tensors only
    dist.init_process_group(f"cpu:gloo,{NAME}:gloo", init_method=store, rank=rank, world_size=n)
    return fn(rank, *args)


def _main(words: list[str]) -> None:
    from accelerator.rehearsal_device import device

    device()
    warm.cli_main(words)


def distflow_run(path: Path, *overrides: str, **options: Any) -> warm.Ended:
    """Does what `warm.distflow_run` does, on the device."""
    return warm.distflow_run(path, *overrides, main=_main, **options)
