"""What a model's modules do, in training, faster on a CPU: in one thread and float32."""

import os
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from distflow.engine.cpu import kernels_for, same
from distflow.engine.model.llama_family import known, silu


def quicken(model: PreTrainedModel) -> None:
    """Its linear layers; in the Llama family also norms, and what is between the matrices of an MLP."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]
        elif known(model) and type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
        elif known(model) and type(module).__name__.endswith("MLP") and silu(module):
            module.forward = MethodType(_mlp, module)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As a layer does it, for x [n, in]; no gradient."""
    if not _by_numpy(x, weight):
        return functional.linear(x, weight, bias)
    compiled, out = kernels_for(x), x.new_empty(len(x), len(weight))
    if compiled and len(weight) % compiled.PANEL == 0:  # faster still
        compiled.multiply(same(x.contiguous()), same(weight), same(out))
    else:
        multiply(x, weight.T, out)
    return out if bias is None else out.add_(bias)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [n, m] · b [m, k]; no gradient."""
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    if not _by_numpy(a, b):
        return torch.mm(a, b, out=out)
    np.matmul(same(a), same(b), out=same(out))
    return out


def _by_numpy(*tensors: Tensor) -> bool:
    """On AMD's CPUs numpy's OpenBLAS is faster than torch's MKL when every core has a worker of its own. How many
    threads it uses is settled when it is loaded: it is asked where one is right."""
    return _plain(*tensors) and torch.get_num_threads() == 1 and _one_thread() and _by_amd()


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    if _by_numpy(x, module.weight):
        return _Linear.apply(x, module.weight, module.bias)  # type: ignore[no-any-return, no-untyped-call]
    return functional.linear(x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_too, weight_too, bias_too = ctx.needs_input_grad
        rows = d.flatten(0, -2)
        return (
            multiply(rows, weight).view(x.shape) if x_too else None,
            multiply(rows.T, x.flatten(0, -2)) if weight_too else None,
            rows.sum(0) if bias_too else None,
        )


def _norm(module: Any, x: Tensor) -> Tensor:
    if _plain(x, module.weight) and kernels_for(x):
        return _Norm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
    return type(module).forward(module, x)  # type: ignore[no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        compiled, rows = kernels_for(x), _rows(x)
        assert compiled is not None
        ctx.save_for_backward(rows, weight)
        ctx.epsilon, ctx.compiled = np.float32(epsilon), compiled
        out = torch.empty_like(rows)
        compiled.norm(same(rows), same(weight), ctx.epsilon, same(out))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(rows), torch.zeros_like(weight)
        ctx.compiled.norm_back(same(_rows(d)), same(rows), same(weight), ctx.epsilon, same(dx), same(dw))
        return dx.view(d.shape), dw if ctx.needs_input_grad[1] else None, None


def _mlp(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    both = _Gate.apply(gate, up) if _plain(gate, up) and kernels_for(gate) else module.act_fn(gate) * up  # type: ignore[no-untyped-call]
    return module.down_proj(both)  # type: ignore[no-any-return]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        compiled, *pair = kernels_for(gate), _rows(gate), _rows(up)
        assert compiled is not None
        ctx.save_for_backward(*pair)
        ctx.compiled = compiled
        out = torch.empty_like(pair[0])
        compiled.gate(*map(same, pair), same(out))
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        pair = ctx.saved_tensors
        made = [torch.empty_like(t) for t in pair]
        ctx.compiled.gate_back(same(_rows(d)), *map(same, pair), *map(same, made))
        return tuple(t.view(d.shape) for t in made)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()


def _plain(*tensors: Tensor) -> bool:
    return all(type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu for t in tensors)


def _one_thread() -> bool:
    return os.environ.get("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS")) == "1"


@cache
def _by_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
