"""Modules of a model under training, replaced by ones that are faster on a CPU: in one thread and float32."""

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from distflow.cpu import as_numpy, kernels_for
from distflow.model.llama_family import is_llama_like, uses_silu


def use_cpu_modules(model: PreTrainedModel) -> None:
    """Changes the class of linear layers, in the Llama family also of norms and MLPs; `print(model)` shows it.

    Parameters, names and results stay as they are, but for rounding.
    """
    for module in model.modules():
        kind: Any = type(module)
        if kind is nn.Linear:
            module.__class__ = CpuLinear
        elif is_llama_like(model) and kind.__name__.endswith("RMSNorm"):
            module.__class__ = _subclass(CpuRMSNorm, kind)
        elif is_llama_like(model) and kind.__name__.endswith("MLP") and uses_silu(module):
            module.__class__ = _subclass(CpuGatedMLP, kind)


@cache  # one class per kind of module
def _subclass(ours: Any, theirs: Any) -> Any:
    return type(f"Cpu{theirs.__name__}", (ours, theirs), {})


class CpuLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if _multiplier(x, self.weight):
            return _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return functional.linear(x, self.weight, self.bias)


class CpuRMSNorm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if _plain(x, self.weight) and kernels_for(x):
            return _NormFunction.apply(x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)  # type: ignore[no-any-return]


class CpuGatedMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if _plain(gate, up) and kernels_for(gate):
            return self.down_proj(_Gate.apply(gate, up))  # type: ignore[no-any-return, no-untyped-call]
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer for x [n, in], without a gradient."""
    if not _multiplier(x, weight):
        return functional.linear(x, weight, bias)
    out = multiply(x, weight.T)
    return out if bias is None else out.add_(bias)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [n, m] · b [m, k], without a gradient."""
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    if kernels := _multiplier(a, b, out):
        kernels.multiply(as_numpy(a), as_numpy(b), as_numpy(out), True)
        return out
    return torch.mm(a, b, out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Adds a [n, m] · b [m, k] to `out`, without a gradient."""
    if kernels := _multiplier(a, b, out):
        kernels.multiply(as_numpy(a), as_numpy(b), as_numpy(out), False)
    else:
        out.addmm_(a, b)


def _multiplier(*tensors: Tensor) -> ModuleType | None:
    """Returns the kernels if they multiply faster than torch's MKL: on AMD's CPUs, twice as fast."""
    kernels = kernels_for(tensors[0]) if _plain(*tensors) and _is_amd() else None
    return kernels if kernels and all(t.numel() for t in tensors) else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = d.flatten(0, -2)
        return (
            multiply(rows, weight).view(x.shape) if needs_x else None,
            multiply(rows.T, x.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels, rows = kernels_for(x), _rows(x)
        assert kernels is not None
        ctx.save_for_backward(rows, weight)
        ctx.epsilon, ctx.kernels = np.float32(epsilon), kernels
        out = torch.empty_like(rows)
        kernels.norm(as_numpy(rows), as_numpy(weight), ctx.epsilon, as_numpy(out))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(rows), torch.zeros_like(weight)
        arrays = map(as_numpy, (_rows(d), rows, weight))
        ctx.kernels.norm_backward(*arrays, ctx.epsilon, as_numpy(dx), as_numpy(dw))
        return dx.view(d.shape), dw if ctx.needs_input_grad[1] else None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        kernels, *pair = kernels_for(gate), _rows(gate), _rows(up)
        assert kernels is not None
        ctx.save_for_backward(*pair)
        ctx.kernels = kernels
        out = torch.empty_like(pair[0])
        kernels.gate(*map(as_numpy, pair), as_numpy(out))
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        pair = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in pair]
        ctx.kernels.gate_backward(as_numpy(_rows(d)), *map(as_numpy, pair), *map(as_numpy, grads))
        return tuple(g.view(d.shape) for g in grads)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _plain(*tensors: Tensor) -> bool:
    return all(type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu for t in tensors)


@cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
