"""A forward pass of the Llama family on a CPU, in kernels of ours but for a prompt's attention to itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from distflow.data.balance import Ints
from distflow.engine.cpu import kernels_for, same
from distflow.engine.model.attention import Attention
from distflow.engine.model.llama_family import hooked, how, matrices, reentrant, silu

Floats = NDArray[np.float32]
_NONE = np.zeros(0, np.float32)


class Compiled:
    """While it is `ready`, the model's matrices lie in another order, in their own memory."""

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """If there are kernels for this thread, and they can do what this model does."""
        compiled = kernels_for(model.lm_head.weight)
        if compiled is None or not reentrant(model) or hooked([model.lm_head]):
            return None
        for block in model.model.layers:
            layers = [layer for some in matrices(block) for layer in some]
            fits = all(_fits(layer.weight, compiled) for layer in layers)
            if not fits or hooked(layers) or not silu(block.mlp):
                return None
        return cls(model, compiled)

    def __init__(self, model: Any, compiled: ModuleType) -> None:
        self.kernels, self.body, self.head = compiled, model.model, model.lm_head
        self.layers = [_Layer(block, compiled) for block in self.body.layers]
        self.norm, self.bias = _norm(self.body.norm), _bias([self.head])
        self.panels = _panels(self.head.weight, compiled) if _fits(self.head.weight, compiled) else None
        self.tied = self.head.weight.data_ptr() == self.body.embed_tokens.weight.data_ptr()
        self.turns = _turns(self.body, 0)

    @contextmanager
    def ready(self) -> Iterator[None]:
        every = [panels for layer in self.layers for some in layer.matrices for panels in some]
        every += [] if self.panels is None else [self.panels]
        for panels in every:
            self.kernels.lay(panels)
        try:
            yield
        finally:
            for panels in every:
                self.kernels.lay_back(panels)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        x, places, turns = self._embed(tokens), positions.numpy(), self.turns  # another thread may change them
        if (length := int(places.max()) + 1) > len(turns[0]):
            self.turns = turns = _turns(self.body, 2 * length)
        room = _Room(len(x), self.layers[0])
        for layer in self.layers:
            layer(x, places, turns, attention, room)
        return self._logits(x if keep is None else x[keep.numpy()])

    def _embed(self, tokens: Tensor) -> Floats:
        if self.tied and self.panels is not None:
            panel, row = np.divmod(tokens.numpy(), self.kernels.PANEL)
            return np.ascontiguousarray(self.panels[panel, :, row])
        return self.body.embed_tokens(tokens).numpy()  # type: ignore[no-any-return]

    def _logits(self, x: Floats) -> Tensor:
        normed = np.empty_like(x)
        self.kernels.norm(x, *self.norm, normed)
        if self.panels is None:
            return linear(torch.from_numpy(normed), self.head.weight, self.head.bias)
        out = np.zeros((len(x), len(self.head.weight)), np.float32)
        self.kernels.add(normed, (self.panels,), self.bias, out)
        return torch.from_numpy(out)


class _Layer:
    def __init__(self, block: Any, compiled: ModuleType) -> None:
        at, together = block.self_attn, matrices(block)
        self.kernels, self.index, self.how = compiled, at.layer_idx, how(at)
        self.matrices = [tuple(_panels(layer.weight, compiled) for layer in layers) for layers in together]
        self.biases = [_bias(layers) for layers in together]
        self.dim, self.heads = at.head_dim, tuple(len(layer.weight) // at.head_dim for layer in together[0])
        self.first, self.second = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        self.norms = (_norm(at.q_norm)[0], _norm(at.k_norm)[0]) if hasattr(at, "q_norm") else (_NONE, _NONE)

    def __call__(
        self, x: Floats, places: Ints, turns: tuple[Floats, Floats], attention: Attention, room: "_Room"
    ) -> None:
        """`x` is written over."""
        (qkv, o, gate_up, down), biases = self.matrices, self.biases
        queries, keys, _ = self.heads
        self.kernels.before(
            x, *self.first, qkv, biases[0], self.norms, queries, keys, places, *turns, room.normed, room.qkv
        )
        y = attention(self.index, *room.parts, self.how).flatten(1).contiguous().numpy()
        self.kernels.after(
            x, y, o, biases[1], *self.second, gate_up, biases[2], down, biases[3], room.normed, room.both, room.gated
        )


class _Room:
    """What lies between the matrices of a layer, for one layer after the other."""

    def __init__(self, n: int, layer: _Layer) -> None:
        (qkv, *_), _, _, (down,) = layer.matrices
        hidden, inner = qkv.shape[1], down.shape[1]
        self.normed = np.empty((n, hidden), np.float32)
        self.qkv = np.empty((n, sum(layer.heads), layer.dim), np.float32)
        q, k, v = (part.transpose(0, 1) for part in torch.from_numpy(self.qkv).split(layer.heads, 1))
        self.parts = q, k, v
        self.both, self.gated = np.empty((n, 2 * inner), np.float32), np.empty((n, inner), np.float32)


def _fits(weight: Tensor, compiled: ModuleType) -> bool:
    return weight.is_contiguous() and len(weight) % compiled.PANEL == 0 and same(weight).flags.writeable


def _panels(weight: Tensor, compiled: ModuleType) -> Floats:
    return same(weight).reshape(-1, weight.shape[1], compiled.PANEL)


def _bias(layers: Sequence[nn.Linear]) -> Floats:
    if all(layer.bias is None for layer in layers):
        return _NONE
    each: list[Tensor] = [
        layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers
    ]
    return same(torch.cat(each))


def _norm(module: Any) -> tuple[Floats, np.float32]:
    return same(module.weight), np.float32(module.variance_epsilon)


def _turns(body: Any, length: int) -> tuple[Floats, Floats]:
    """cos and sin of each position [length, dim], the first half of sin negative."""
    cos, sin = (t[0] for t in body.rotary_emb(body.norm.weight, torch.arange(length)[None]))
    below, above = sin.chunk(2, -1)
    return cos.numpy(), torch.cat((-below, above), -1).numpy()
