"""Small models of several architectures, each with transformers' own attention and with ours."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distflow.model import attention
from distflow.model.attention import PackedAttention
from distflow.model.llama_family import fused_weights
from distflow.rollout.builtin.weight_buffers import empty_weights

VOCABULARY = 61
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 5
_MORE: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {
        "sliding_window": WINDOW,  # in every other layer
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MIXTURES = ("qwen3_moe", "mixtral")
ARCHITECTURES = tuple(arch for arch in _MORE if arch not in MIXTURES)


@dataclass(frozen=True)
class Pair:
    eager: PreTrainedModel
    ours: PreTrainedModel  # the same weights

    @property
    def config(self) -> PreTrainedConfig:
        return self.eager.config

    def alone(self, tokens: list[int]) -> Tensor:
        """Returns the logits [tokens, vocabulary] of one sequence, by transformers alone."""
        with torch.no_grad():
            return self.eager(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def packed(self, rows: list[list[int]]) -> Tensor:
        """Returns the logits of all sequences, computed in one pass."""
        lengths = [len(r) for r in rows]
        out = self.ours(
            input_ids=torch.tensor([[t for r in rows for t in r]]),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            use_cache=False,
            distflow=PackedAttention(lengths),
        )
        return out.logits[0]


def config_of(arch: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(arch, **{**_BASE, **_MORE[arch], **changes})


@cache
def pair(arch: str) -> Pair:
    eager = AutoModelForCausalLM.from_config(config_of(arch), attn_implementation="eager", dtype=torch.float32).eval()
    randomize_weights(eager)
    ours = AutoModelForCausalLM.from_config(config_of(arch), attn_implementation=attention.NAME, dtype=torch.float32)
    ours.load_state_dict(eager.state_dict())
    return Pair(eager.requires_grad_(False), ours.eval().requires_grad_(False))


def randomize_weights(model: PreTrainedModel) -> None:
    """Draws larger weights: with the initial ones attention would hardly tell one token from another."""
    noise = torch.Generator().manual_seed(7)
    for p in model.parameters():
        noisy = torch.randn(p.shape, generator=noise)
        p.data = 0.3 * noisy if p.ndim > 1 else p.data + 0.5 * noisy


def side_by_side(model: PreTrainedModel) -> dict[str, Tensor]:
    """Moves the weights of a model to memory as a rollout engine allocates it, and returns them."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tensors = empty_weights(shapes, fused_weights(model), torch.float32, torch.device("cpu"))
    for name, p in model.named_parameters():
        p.data = tensors[name].copy_(p.data)
    return tensors
