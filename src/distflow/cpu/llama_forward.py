"""A forward pass of the Llama family in kernels, but for a prompt's attention to itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from distflow.cpu import as_numpy, kernels_for
from distflow.model.attention import Attention
from distflow.model.llama_family import attention_params, has_hooks, is_reentrant, projections, uses_silu
from distflow.util.arrays import Ints

Floats = NDArray[np.float32]
_NONE = np.zeros(0, np.float32)
_MIN_ROWS = 8


class CpuLlamaForward:
    """Reads the model's own weights, which lie in panels, in their own memory, inside of `packed_weights`."""

    @classmethod
    def for_model(cls, model: Any) -> Self | None:
        """Returns one if there are kernels for this thread and they can do what this model does."""
        kernels = kernels_for(model.lm_head.weight)
        if kernels is None or not is_reentrant(model) or has_hooks([model.lm_head]):
            return None
        for block in model.model.layers:
            layers = [layer for fused in projections(block) for layer in fused]
            fits = all(_fits(layer.weight, kernels) for layer in layers)
            if not fits or has_hooks(layers) or not uses_silu(block.mlp):
                return None
        return cls(model, kernels)

    def __init__(self, model: Any, kernels: ModuleType) -> None:
        self.kernels, self.body, self.head = kernels, model.model, model.lm_head
        self.layers = [_KernelLayer(block, kernels) for block in self.body.layers]
        self.norm, self.bias = _norm(self.body.norm), _bias([self.head])
        self.panels = _panels(self.head.weight, kernels) if _fits(self.head.weight, kernels) else None
        self.tied = self.head.weight.data_ptr() == self.body.embed_tokens.weight.data_ptr()
        self.rotary = _rotary(self.body, 0)

    @contextmanager
    def packed_weights(self) -> Iterator[None]:
        """Repacks the weights in place, and back at the end, also after a failure."""
        weights = [panels for layer in self.layers for fused in layer.weights for panels in fused]
        weights += [] if self.panels is None else [self.panels]
        for panels in weights:
            self.kernels.pack(panels)
        try:
            yield
        finally:
            for panels in weights:
                self.kernels.unpack(panels)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        x, places, rotary = self._embed(tokens), positions.numpy(), self.rotary  # another thread may replace it
        if (length := int(places.max()) + 1) > len(rotary[0]):
            self.rotary = rotary = _rotary(self.body, 2 * length)
        buffers = _Buffers(len(x), self.layers[0])
        for layer in self.layers:
            layer(x, places, rotary, attention, buffers)
        return self._logits(x if keep is None else x[keep.numpy()])

    def _embed(self, tokens: Tensor) -> Floats:
        if self.tied and self.panels is not None:
            panel, row = np.divmod(tokens.numpy(), self.kernels.PANEL)
            return np.ascontiguousarray(self.panels[panel, :, row])
        return self.body.embed_tokens(tokens).numpy()  # type: ignore[no-any-return]

    def _logits(self, x: Floats) -> Tensor:
        # MKL multiplies a few rows in another way than many; with more, a row's logits do not depend on the others.
        normed = np.zeros((max(len(x), _MIN_ROWS), x.shape[1]), np.float32)
        self.kernels.norm(x, *self.norm, normed)
        if self.panels is None:
            return linear(torch.from_numpy(normed), self.head.weight, self.head.bias)[: len(x)]
        normed = normed[: len(x)]
        out = np.zeros((len(x), len(self.head.weight)), np.float32)
        self.kernels.add_linear(normed, (self.panels,), self.bias, out)
        return torch.from_numpy(out)


class _KernelLayer:
    def __init__(self, block: Any, kernels: ModuleType) -> None:
        at, fused = block.self_attn, projections(block)
        self.kernels, self.index, self.params = kernels, at.layer_idx, attention_params(at)
        self.weights = [tuple(_panels(layer.weight, kernels) for layer in layers) for layers in fused]
        self.biases = [_bias(layers) for layers in fused]
        self.dim, self.heads = at.head_dim, tuple(len(layer.weight) // at.head_dim for layer in fused[0])
        self.input_norm, self.post_norm = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self.qk_norms = (_norm(at.q_norm)[0], _norm(at.k_norm)[0]) if hasattr(at, "q_norm") else (_NONE, _NONE)

    def __call__(
        self, x: Floats, places: Ints, rotary: tuple[Floats, Floats], attention: Attention, buffers: "_Buffers"
    ) -> None:
        """Overwrites `x`."""
        (qkv, o, gate_up, down), biases, b = self.weights, self.biases, buffers
        queries, keys, _ = self.heads
        self.kernels.before_attention(
            x, *self.input_norm, qkv, biases[0], self.qk_norms, queries, keys, places, *rotary, b.normed, b.qkv
        )
        y = attention(self.index, *b.q_k_v, self.params).flatten(1).contiguous().numpy()
        self.kernels.after_attention(
            x, y, o, biases[1], *self.post_norm, gate_up, biases[2], down, biases[3], b.normed, b.gate_up, b.gated
        )


class _Buffers:
    """Activations inside a layer, for one layer after the other."""

    def __init__(self, n: int, layer: _KernelLayer) -> None:
        (qkv, *_), _, _, (down,) = layer.weights
        hidden, inner = qkv.shape[1], down.shape[1]
        self.normed = np.empty((n, hidden), np.float32)
        self.qkv = np.empty((n, sum(layer.heads), layer.dim), np.float32)
        q, k, v = (part.transpose(0, 1) for part in torch.from_numpy(self.qkv).split(layer.heads, 1))
        self.q_k_v = q, k, v
        self.gate_up, self.gated = np.empty((n, 2 * inner), np.float32), np.empty((n, inner), np.float32)


def _fits(weight: Tensor, kernels: ModuleType) -> bool:
    return weight.is_contiguous() and len(weight) % kernels.PANEL == 0 and as_numpy(weight).flags.writeable


def _panels(weight: Tensor, kernels: ModuleType) -> Floats:
    return as_numpy(weight).reshape(-1, weight.shape[1], kernels.PANEL)


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
