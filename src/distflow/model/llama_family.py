"""The Llama family: models that differ only in biases and in norms of queries and keys."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from distflow.model.attention import AttentionParams

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def is_llama_like(model: PreTrainedModel) -> bool:
    kind = model.config.model_type
    return kind in FAMILY and type(model).__module__ == f"transformers.models.{kind}.modeling_{kind}"


def is_reentrant(model: Any) -> bool:
    """Returns whether several threads may run the model at once: no module keeps state between calls."""
    return is_llama_like(model) and model.model.rotary_emb.rope_type not in ("dynamic", "longrope")


def fused_weights(model: Any) -> Iterator[list[str]]:
    """Yields the names of matrices with the same input, which can be one matrix in memory."""
    names = {p: name for name, p in model.named_parameters()}
    for block in model.model.layers if is_llama_like(model) else ():
        for layers in projections(block):
            yield [names[layer.weight] for layer in layers]


def projections(block: Any) -> tuple[Sequence[nn.Linear], ...]:
    """Returns the linear layers of a block: qkv, o, gate and up, down."""
    at, mlp = block.self_attn, block.mlp
    return (at.q_proj, at.k_proj, at.v_proj), (at.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)


def has_hooks(layers: Sequence[nn.Linear]) -> bool:
    """Returns whether calling a layer does more than multiply, as under tensor parallelism."""
    return any(layer._forward_hooks for layer in layers)


def uses_silu(mlp: Any) -> bool:
    return isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def attention_params(attention: Any) -> AttentionParams:
    """Returns the parameters of a layer; Mistral has one window in its config, for all layers."""
    owner = attention if hasattr(attention, "sliding_window") else attention.config
    return AttentionParams(attention.scaling, getattr(owner, "sliding_window", None))
