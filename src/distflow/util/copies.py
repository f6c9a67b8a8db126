"""Copies between host memory and a device without waiting for the device, which takes pinned memory."""

import torch
from torch import Tensor

_DIRECT = ("cpu", "meta")  # types of devices that are not waited for


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on the device, as it is now: it may be changed while it is still being copied."""
    if not tensor.is_cpu or device.type in _DIRECT:
        return tensor.to(device)
    if not tensor.numel():
        return torch.empty_like(tensor, device=device)
    return empty_pinned(tensor).copy_(tensor).to(device, non_blocking=True)


def fill(target: Tensor, source: Tensor) -> None:
    """Copies host memory as it is now into a tensor of the device."""
    target.copy_(empty_pinned(source).copy_(source), non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, which is complete once the device's work so far is: wait for that to read it."""
    if tensor.device.type in _DIRECT:
        return torch.empty_like(tensor, device="cpu").copy_(tensor)
    return empty_pinned(tensor).copy_(tensor, non_blocking=True)


def empty_pinned(like: Tensor) -> Tensor:
    """Returns host memory for a tensor like this one, which a device reads and writes by itself."""
    return torch.empty_like(like, device="cpu", pin_memory=True)
