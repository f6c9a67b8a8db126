"""The Llama family: models that are the same but for biases and norms of queries and keys."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from distflow.engine.model.attention import How

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def known(model: PreTrainedModel) -> bool:
    kind = model.config.model_type
    return kind in FAMILY and type(model).__module__ == f"transformers.models.{kind}.modeling_{kind}"


def reentrant(model: Any) -> bool:
    """Several threads may pass through it at once: no module keeps anything from one call to the next."""
    return known(model) and model.model.rotary_emb.rope_type not in ("dynamic", "longrope")


def together(model: Any) -> Iterator[list[str]]:
    """Names of the matrices in the layers, those that are multiplied with the same input together: if they lie side by
    side in memory, they are one."""
    names = {p: name for name, p in model.named_parameters()}
    for block in model.model.layers if known(model) else ():
        for layers in matrices(block):
            yield [names[layer.weight] for layer in layers]


def matrices(block: Any) -> tuple[Sequence[nn.Linear], ...]:
    at, mlp = block.self_attn, block.mlp
    return (at.q_proj, at.k_proj, at.v_proj), (at.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)


def hooked(layers: Sequence[nn.Linear]) -> bool:
    """As by tensor parallelism."""
    return any(layer._forward_hooks for layer in layers)


def silu(mlp: Any) -> bool:
    return isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


def how(attention: Any) -> How:
    """Mistral says its window in its config, for all layers."""
    who = attention if hasattr(attention, "sliding_window") else attention.config
    return How(attention.scaling, getattr(who, "sliding_window", None))
