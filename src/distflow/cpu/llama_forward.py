"""A forward pass of the Llama family in kernels, but for a prompt's attention to itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from distflow.cpu import Floats, as_numpy, in_threads, kernels_for
from distflow.cpu.products import PackedWeight
from distflow.model.attention import Attention
from distflow.model.llama_family import attention_params, has_hooks, is_reentrant, projections, uses_silu
from distflow.util.arrays import Ints

_NONE = np.zeros(0, np.float32)


class CpuLlamaForward:
    """Reads the model's own weights, which lie in panels, in their own memory, inside of `packed_weights`."""

    @classmethod
    def for_model(cls, model: Any) -> Self | None:
        """Returns one if there are kernels for this thread and they can do what this model does."""
        kernels = kernels_for(model.lm_head.weight)
        if kernels is None or not is_reentrant(model) or not all(uses_silu(b.mlp) for b in model.model.layers):
            return None
        layers = [layer for block in model.model.layers for fused in projections(block) for layer in fused]
        layers.append(model.lm_head)
        fits = all(PackedWeight.fits(layer.weight) for layer in layers) and not has_hooks(layers)
        return cls(model, kernels) if fits else None

    def __init__(self, model: Any, kernels: ModuleType) -> None:
        self.kernels, self.body, self.head = kernels, model.model, model.lm_head
        self.layers = [_KernelLayer(block, kernels) for block in self.body.layers]
        self.norm, self.bias, self.output = _norm(self.body.norm), _bias([self.head]), PackedWeight(self.head.weight)
        self.tied = self.head.weight.data_ptr() == self.body.embed_tokens.weight.data_ptr()
        self.rotary = _rotary(self.body, 0)

    @contextmanager
    def packed_weights(self) -> Iterator[None]:
        """Repacks the weights in place, and back at the end, also after a failure."""
        weights = [weight for layer in self.layers for fused in layer.weights for weight in fused]
        for weight in (*weights, self.output):
            weight.pack()
        try:
            yield
        finally:
            for weight in (*weights, self.output):
                weight.unpack()

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        x, places, rotary = self._embed(tokens), positions.numpy(), self.rotary  # another thread may replace it
        if (length := int(places.max()) + 1) > len(rotary[0]):
            self.rotary = rotary = _rotary(self.body, 2 * length)
        buffers = _Buffers(len(x), self.layers[0])
        for layer in self.layers:
            layer(x, places, rotary, attention, buffers)
        return self._logits(x if keep is None else x[keep.numpy()])

    def _embed(self, tokens: Tensor) -> Floats:
        if self.tied:
            return self.output.rows(tokens.numpy())
        return self.body.embed_tokens(tokens).numpy()  # type: ignore[no-any-return]

    def _logits(self, x: Floats) -> Tensor:
        normed, out = np.empty_like(x), np.empty((len(x), len(self.head.weight)), np.float32)

        def part(some: slice) -> None:
            self.kernels.norm(x[some], *self.norm, normed[some])
            self.kernels.linear(normed[some], (self.output.parts,), self.bias, out[some])

        in_threads(part, len(x), out.size * x.shape[1])
        return torch.from_numpy(out)


class _KernelLayer:
    def __init__(self, block: Any, kernels: ModuleType) -> None:
        at, fused = block.self_attn, projections(block)
        self.kernels, self.index, self.params = kernels, at.layer_idx, attention_params(at)
        self.weights = [tuple(PackedWeight(layer.weight) for layer in layers) for layers in fused]
        self.parts = [tuple(weight.parts for weight in weights) for weights in self.weights]
        self.biases = [_bias(layers) for layers in fused]
        self.dim, self.heads = at.head_dim, tuple(len(layer.weight) // at.head_dim for layer in fused[0])
        self.input_norm, self.post_norm = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self.qk_norms = (_norm(at.q_norm)[0], _norm(at.k_norm)[0]) if hasattr(at, "q_norm") else (_NONE, _NONE)
        self.size = sum(layer.weight.numel() for layers in fused for layer in layers)

    def __call__(
        self, x: Floats, places: Ints, rotary: tuple[Floats, Floats], attention: Attention, buffers: "_Buffers"
    ) -> None:
        """Overwrites `x`."""
        (qkv, o, gate_up, down), biases, b = self.parts, self.biases, buffers
        queries, keys, _ = self.heads

        def before(some: slice) -> None:
            to, norm, norms = (b.normed[some], b.qkv[some]), self.input_norm, self.qk_norms
            arguments = x[some], *norm, qkv, biases[0], norms, queries, keys, places[some], *rotary, *to
            self.kernels.before_attention(*arguments)

        def after(some: slice) -> None:
            mlp = gate_up, biases[2], down, biases[3]
            to = b.normed[some], b.gate_up[some], b.gated[some]
            self.kernels.after_attention(x[some], y[some], o, biases[1], *self.post_norm, *mlp, *to)

        in_threads(before, len(x), len(x) * self.size // 2)
        y = attention(self.index, *b.q_k_v, self.params).flatten(1).contiguous().numpy()
        in_threads(after, len(x), len(x) * self.size // 2)


class _Buffers:
    """Activations inside a layer, for one layer after the other."""

    def __init__(self, n: int, layer: _KernelLayer) -> None:
        (qkv, *_), _, _, (down,) = layer.weights
        hidden, inner = qkv.array.shape[1], down.array.shape[1]
        self.normed = np.empty((n, hidden), np.float32)
        self.qkv = np.empty((n, sum(layer.heads), layer.dim), np.float32)
        q, k, v = (part.transpose(0, 1) for part in torch.from_numpy(self.qkv).split(layer.heads, 1))
        self.q_k_v = q, k, v
        self.gate_up, self.gated = np.empty((n, 2 * inner), np.float32), np.empty((n, inner), np.float32)


def _bias(layers: Sequence[nn.Linear]) -> Floats:
    if all(layer.bias is None for layer in layers):
        return _NONE
    each: list[Tensor] = [
        layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers
    ]
    return as_numpy(torch.cat(each))


def _norm(module: Any) -> tuple[Floats, np.float32]:
    return as_numpy(module.weight), np.float32(module.variance_epsilon)


def _rotary(body: Any, length: int) -> tuple[Floats, Floats]:
    """cos and sin of each position [length, dim], the first half of sin negative."""
    cos, sin = (t[0] for t in body.rotary_emb(body.norm.weight, torch.arange(length)[None]))
    below, above = sin.chunk(2, -1)
    return cos.numpy(), torch.cat((-below, above), -1).numpy()
