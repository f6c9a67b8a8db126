"""Reads what the accelerator of this worker offers."""

from dataclasses import dataclass, replace
from typing import Any

import torch

_ALIKE = 1 << 30  # bytes by which devices of a kind may differ


@dataclass(frozen=True)
class Offer:
    """An accelerator, as far as choices depend on it."""

    kind: str  # of device, as torch calls it
    name: str
    memory: int  # bytes that are free before anything is loaded; 0: unknown
    bfloat16: bool


def offer_of(device: torch.device) -> Offer | None:
    """Returns what the device offers; None for a CPU."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else device.type
    bfloat16 = not hasattr(module, "is_bf16_supported") or bool(module.is_bf16_supported())
    return Offer(device.type, str(name), _free(device), bfloat16)


def _free(device: torch.device) -> int:
    if not hasattr(torch.accelerator, "get_memory_info"):  # in older versions
        return 0
    return int(torch.accelerator.get_memory_info(device)[0])


def whole_offer(device: torch.device) -> Offer | None:
    """Returns what an idle device offers: the same for all devices of a kind."""
    offer = offer_of(device)
    if offer is None or not offer.memory:
        return offer
    whole = int(torch.accelerator.get_memory_info(device)[1])
    return replace(offer, memory=whole - whole % _ALIKE)


def release_cached(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the device: an engine may have an allocator of its own."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
