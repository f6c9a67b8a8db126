"""A forward pass of the Llama family without the overhead of Hugging Face's modules, a third of a decoding step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distflow.model.attention import Attention
from distflow.model.llama_family import attention_params, has_hooks, projections
from distflow.model.torch_kernels import float32_logits, torch_has


class LlamaForward:
    """Computes what the model's own modules would."""

    def __init__(self, model: Any) -> None:
        self.body, self.head = model.model, _FusedLinear([model.lm_head])
        self.layers = [_LlamaLayer(block) for block in self.body.layers]
        self.norm = _RMSNorm(self.body.norm)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        x = self.hidden(tokens, positions, attention)
        return self.logits(x if keep is None else x[keep])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Returns what the output layer reads, [n, hidden]."""
        x = self.body.embed_tokens(tokens)
        cos, sin = (t[0][:, None] for t in self.body.rotary_emb(x, positions[None]))  # [n, 1, dim]
        below, above = sin.chunk(2, -1)
        sin = torch.cat((-below, above), -1)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.in_float32(hidden)

    def packed_weights(self) -> AbstractContextManager[None]:
        return nullcontext()


class _LlamaLayer:
    def __init__(self, block: Any) -> None:
        at, self.act = block.self_attn, block.mlp.act_fn
        self.index, self.dim = at.layer_idx, at.head_dim
        self.params = attention_params(at)
        self.input_norm, self.post_norm = _RMSNorm(block.input_layernorm), _RMSNorm(block.post_attention_layernorm)
        qkv, o, gate_up, down = projections(block)
        self.heads = [len(layer.weight) // self.dim for layer in qkv]
        self.qkv, self.o, self.gate_up, self.down = (_FusedLinear(layers) for layers in (qkv, o, gate_up, down))
        self.norms = (_RMSNorm(at.q_norm), _RMSNorm(at.k_norm)) if hasattr(at, "q_norm") else None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Overwrites `x`."""
        qkv = self.qkv(self.input_norm(x)).unflatten(1, (-1, self.dim))  # [n, heads, dim]
        q, k, v = qkv.split(self.heads, 1)
        if self.norms:
            q, k = (_rotate(norm(part), cos, sin) for norm, part in zip(self.norms, (q, k), strict=True))
        else:
            both = qkv[:, : -self.heads[2]]
            _rotate(both, cos, sin, out=both)  # keys and values stay side by side
        y = attention(self.index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.params)
        x = self.o.add(x, y.flatten(1))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return self.down.add(x, self.act(gate).mul_(up))


class _FusedLinear:
    """Linear layers with the same input, as one product if their weights lie side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.weight = self.bias = None
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        if len(biases) in (0, len(layers)) and not has_hooks(layers):
            self.weight = joined([layer.weight for layer in layers])
            self.bias = torch.cat(biases) if biases and self.weight is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return torch.cat([layer(x) for layer in self.layers], -1)
        return linear(x, self.weight, self.bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return self(x) if self.weight is None else float32_logits(x, self.weight, self.bias)

    def add(self, to: Tensor, x: Tensor) -> Tensor:
        """Adds the output to `to`, in place."""
        if self.weight is None or self.bias is not None:
            return to.add_(self(x))
        return to.addmm_(x, self.weight.T)


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns these matrices as one, if they lie one below the other in memory."""
    first, rows = parts[0], 0
    for part in parts:
        memory, place = part.untyped_storage().data_ptr(), first.storage_offset() + rows * first.stride(0)
        if memory != first.untyped_storage().data_ptr() or part.storage_offset() != place:
            return None
        if part.stride() != first.stride() or part.shape[1] != first.shape[1]:
            return None
        rows += len(part)
    return first.as_strided((rows, first.shape[1]), first.stride())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Applies rotary embeddings; the first half of `sin` is negative. `out` may be `x`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)


class _RMSNorm:
    def __init__(self, module: Any) -> None:
        self.module, self.weight = module, module.weight
        self.epsilon = self.weight.new_full((), module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype.itemsize == 2 and torch_has("aten::_fused_rms_norm", x.device):
            shape, epsilon = [x.shape[-1]], self.module.variance_epsilon
            return torch.ops.aten._fused_rms_norm(x, shape, self.weight, epsilon)[0]  # type: ignore[no-any-return]
        if x.dtype != torch.float32:  # the module decides where it rounds
            return self.module(x)  # type: ignore[no-any-return]
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(torch.addcmul(self.epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)
