"""Modules of a model, replaced by ones that compute in kernels: under training, and in a rollout alike."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.config.schema import MIXTURES
from distflow.cpu import as_numpy, by_rows, in_threads, kernels_for
from distflow.cpu.products import PackedWeight, grouped_linear, linear, ranges
from distflow.model.experts import Experts, experts_blocks
from distflow.model.llama_family import FAMILY, is_llama_like, uses_silu

KNOWN = (*FAMILY, *MIXTURES, "gemma", "gemma2")  # architectures whose modules all have been looked at
_COST = 8  # of an element, in multiplications of a product


def use_cpu_modules(model: PreTrainedModel) -> None:
    """Changes the class of linear layers, in the Llama family also of norms and MLPs; `print(model)` shows it.

    Parameters, names and results stay as they are, but for rounding.
    """
    for module in model.modules():
        kind: Any = type(module)
        if kind is nn.Linear:
            module.__class__ = CpuLinear
        elif kind is Experts:
            module.__class__ = CpuExperts
        elif is_llama_like(model) and kind.__name__.endswith("RMSNorm"):
            module.__class__ = _subclass(CpuRMSNorm, kind)
        elif is_llama_like(model) and kind.__name__.endswith("MLP") and uses_silu(module):
            module.__class__ = _subclass(CpuGatedMLP, kind)


@cache  # one class per kind of module
def _subclass(ours: Any, theirs: Any) -> Any:
    return type(f"Cpu{theirs.__name__}", (ours, theirs), {})


@contextmanager
def packed_modules(model: PreTrainedModel) -> Iterator[None]:
    """Repacks the weights of linear layers and experts in place, and back at the end. Only in models that are known to
    multiply by them in no other way: any other reader would find them in another order."""
    known = model.config.model_type in KNOWN
    chosen = [m for m in model.modules() if isinstance(m, CpuLinear | CpuExperts)] if known else []
    others = {id(block.gate) for block in experts_blocks(model)} | {id(model.get_output_embeddings())}
    weights: list[PackedWeight] = []
    for module in chosen:
        matrices = [w for p in module.parameters() for w in ([p] if p.ndim == 2 else p if p.ndim == 3 else ())]
        if id(module) not in others and all(kernels_for(p) for p in module.parameters()):
            module.packed = {w.data_ptr(): PackedWeight(w.detach()) for w in matrices if PackedWeight.fits(w)}
            weights += module.packed.values()
    for weight in weights:
        weight.pack()
    try:
        yield
    finally:
        for weight in weights:
            weight.unpack()
        for module in chosen:
            module.packed = {}


class CpuLinear(nn.Linear):
    packed: Mapping[int, PackedWeight] = {}  # by address

    def forward(self, x: Tensor) -> Tensor:
        if weight := self.packed.get(self.weight.data_ptr()):
            out = x.new_empty(*x.shape[:-1], len(self.weight))  # of which tensor parallelism cuts `out_features`
            weight.product(x.flatten(0, -2), self.bias, out.flatten(0, -2))
            return out
        return linear(x, self.weight, self.bias)


class CpuExperts(Experts):
    packed: Mapping[int, PackedWeight] = {}

    def product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if self.packed:
            out = x.new_empty(len(x), weight.shape[1])
            for matrix, rows in zip(weight, ranges(ends.tolist()), strict=True):
                if rows.start < rows.stop:
                    self.packed[matrix.data_ptr()].product(x[rows], None, out[rows])
            return out
        return grouped_linear(x, weight, ends) if kernels_for(x, weight) else super().product(x, weight, ends)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return _gated(gate, up) if kernels_for(gate, up) and uses_silu(self) else super().gated(gate, up)


class CpuRMSNorm(nn.Module):
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if kernels_for(x, self.weight):
            return _NormFunction.apply(x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)  # type: ignore[no-any-return]


class CpuGatedMLP(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(_gated(gate, up) if kernels_for(gate, up) else self.act_fn(gate) * up)  # type: ignore[no-any-return]


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) × up"""
    return _Gate.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels, rows = kernels_for(x), _rows(x)
        assert kernels is not None
        ctx.save_for_backward(rows, weight)
        ctx.epsilon, ctx.kernels = np.float32(epsilon), kernels
        out = torch.empty_like(rows)
        given, scales, to = map(as_numpy, (rows, weight, out))
        in_threads(lambda some: kernels.norm(given[some], scales, ctx.epsilon, to[some]), len(rows), _COST * x.numel())
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
        by_rows(kernels.gate, _COST, *pair, out)
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        pair = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in pair]
        by_rows(ctx.kernels.gate_backward, _COST, _rows(d), *pair, *grads)
        return tuple(g.view(d.shape) for g in grads)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()
