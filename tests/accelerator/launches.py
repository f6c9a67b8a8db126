"""Counts what a device would be asked to do, on tensors without memory: the launches of kernels, by operation."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distflow.model import attention
from distflow.model.tensor_parallel import parameter_specs
from distflow.plan.layout import Layout
from distflow.rollout.builtin.device_cache import PAGE, DeviceCache, PagedAttention
from distflow.rollout.builtin.llama_forward import LlamaForward
from distflow.rollout.builtin.weight_buffers import WeightBuffers
from distflow.weights.shards import Shards

_QWEN: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "72B": {
        "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
SIZES = tuple(_QWEN)
META, ONE = torch.device("meta"), Shards(Layout((0,), 1, 1), 1)
# CUDA has a kernel for it; without one of its own, torch would take it apart.
_meta: Any = torch._C._dispatch_library("IMPL", "aten", "Meta")
_meta.impl(
    "_fused_rms_norm", "Meta", lambda x, shape, weight, epsilon: (torch.empty_like(x), x.new_empty(x.shape[:-1]))
)
_SEVERAL = {"torch_attn::_varlen_attn": 2}  # and zeros the state of a random generator
_NONE = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense", "aten::detach")


class Launches(TorchDispatchMode):
    """Counts kernels while it is entered. Views and allocations are none; an operation is one, if we know no better."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().partition(".")[0]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if not is_view and not name.startswith(_NONE):
            self.kernels[name] += _SEVERAL.get(name, 1)
        return op(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.kernels.total()


def qwen2(size: str, layers: int | None = None) -> PreTrainedModel:
    """Returns a model of the shapes of Qwen2.5 in bfloat16, with all its layers or fewer, without memory."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model("qwen2", **_QWEN[size] | changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)


def decoding_step(size: str, sequences: int, longest: int, layers: int | None = None) -> Launches:
    """Counts one pass of the built-in engine that computes logits for the next token of each sequence."""
    model = qwen2(size, layers).requires_grad_(False)
    WeightBuffers(model, parameter_specs(model, {}), ONE, 0, torch.bfloat16, META).allocate()
    model.model.rotary_emb.to(META)
    forward, places = LlamaForward(model), np.random.default_rng(0).integers(longest // 4, longest, sequences)
    pages = -(-longest // PAGE)
    cache, tables = DeviceCache(sequences * pages, PAGE), np.arange(sequences * pages).reshape(sequences, pages)
    tokens = torch.empty(sequences, dtype=torch.int64, device=META)
    for _ in range(2):  # the cache is made once
        with Launches() as launches, torch.inference_mode():
            attention = PagedAttention(cache, places, places + 1, tables, META)
            forward(tokens, torch.from_numpy(places).to(META), attention, None)
    return launches
