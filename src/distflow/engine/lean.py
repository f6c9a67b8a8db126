"""A model's forward pass without most of what Hugging Face's modules do between their matrices.

A step of decoding is so small that this was a third of it. For the Llama family, whose members differ only in biases
and in norms of queries and keys; any other model goes through its own `forward`. Linear layers stay modules: their
weights come and go, and tensor parallelism hangs on them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.engine.attention import Attention, How

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
Forward = Callable[[Tensor, Tensor, Attention, Tensor | None], Tensor]


def forward_of(model: PreTrainedModel) -> Forward:
    """A function of tokens [n], positions [n], who attends to what, and whose logits are wanted (None: everybody's)."""
    kind = model.config.model_type
    known = kind in FAMILY and type(model).__module__ == f"transformers.models.{kind}.modeling_{kind}"
    return Lean(model) if known else Full(model)


class Full:
    """Through the model's own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            distflow=attention,
        )
        return out.logits[0]  # type: ignore[no-any-return]


class Lean:
    """The same arithmetic, by hand."""

    def __init__(self, model: Any) -> None:
        self.body, self.head = model.model, model.lm_head
        self.layers = [_Layer(block) for block in self.body.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        x = self.body.embed_tokens(tokens)
        cos, sin = (t[0][:, None] for t in self.body.rotary_emb(x, positions[None]))  # [n, 1, dim]
        below, above = sin.chunk(2, -1)
        sin = torch.cat((-below, above), -1)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        x = _norm(self.body.norm, x)
        return self.head(x if keep is None else x[keep])  # type: ignore[no-any-return]


class _Layer:
    def __init__(self, block: Any) -> None:
        at, mlp = block.self_attn, block.mlp
        self.index, self.dim = at.layer_idx, at.head_dim
        # Mistral says it in its config, for all layers.
        window = at.sliding_window if hasattr(at, "sliding_window") else getattr(at.config, "sliding_window", None)
        self.how = How(at.scaling, window)
        self.before, self.between = block.input_layernorm, block.post_attention_layernorm
        self.q, self.k, self.v, self.o = at.q_proj, at.k_proj, at.v_proj, at.o_proj
        self.q_norm, self.k_norm = getattr(at, "q_norm", None), getattr(at, "k_norm", None)
        self.gate, self.up, self.down, self.act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        y = _norm(self.before, x)
        q, k, v = (w(y).unflatten(1, (-1, self.dim)) for w in (self.q, self.k, self.v))  # [n, heads, dim]
        if self.q_norm is not None:
            q, k = _norm(self.q_norm, q), _norm(self.k_norm, k)
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        y = attention(self.index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.how)
        x = x + self.o(y.flatten(1))
        y = _norm(self.between, x)
        return x + self.down(self.act(self.gate(y)).mul_(self.up(y)))  # type: ignore[no-any-return]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; the first half of `sin` is negative."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _norm(module: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:  # the module knows where it rounds
        return module(x)  # type: ignore[no-any-return]
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return x.mul(scale.add_(module.variance_epsilon).rsqrt_()).mul_(module.weight)
