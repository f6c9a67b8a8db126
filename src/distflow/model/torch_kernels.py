"""Whether torch has the kernel of an operation for a device, and what depends on nothing else."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


@cache
def torch_has(operation: str, device: torch.device) -> bool:
    if device.type == "cuda" and not torch.cuda.is_available():
        return True  # there is no such tensor, but fake ones stand for those of a machine that has them
    lib: Any = torch._C
    return bool(lib._dispatch_has_kernel_for_dispatch_key(operation, lib._dispatch_key_for_device(device.type)))


def multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a [n, m] · b [m, k] in float32 or wider. One of 16 bits is not rounded to them where torch can avoid it."""
    if a.dtype.itemsize == 2 and type(b) in (Tensor, nn.Parameter) and torch_has("aten::mm.dtype", a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(torch.promote_types(a.dtype, torch.float32))


def float32_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output layer, in float32 or wider."""
    if x.dtype.itemsize > 2:
        return linear(x, weight, bias)
    logits = multiply_in_float32(x, weight.T)
    return logits if bias is None else logits.add_(bias)
