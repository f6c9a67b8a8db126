"""Counts the work of a device: the launches of kernels, by operation, on tensors with memory or without."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.config.model_shape import ModelShape
from distflow.model import attention
from distflow.model.tensor_parallel import parameter_specs
from distflow.model.torch_kernels import torch_has
from distflow.plan.layout import Layout
from distflow.rehearsal.check import config_from
from distflow.rollout.builtin.device_cache import PAGE, DeviceCache, PagedAttention
from distflow.rollout.builtin.llama_forward import LlamaForward
from distflow.rollout.builtin.weight_buffers import WeightBuffers
from distflow.weights.shards import Shards

META, _ONE = torch.device("meta"), Shards(Layout((0,), 1, 1), 1)
_SEVERAL = {"torch_attn::_varlen_attn": 2}  # and zeros the state of a random generator
_NONE = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense", "aten::detach")


class Launches(TorchDispatchMode):
    """Counts kernels while it is entered. Views and allocations are none; an operation is one, if we know no better."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


@cache
def _fused_norms_on_meta() -> Any:
    """Gives tensors without memory CUDA's kernel of a norm; without one of its own, torch would take it apart.

    It lasts as long as the returned object.
    """
    lib: Any = torch._C
    library = lib._dispatch_library("IMPL", "aten", "Meta")
    library.impl(
        "_fused_rms_norm", "Meta", lambda x, shape, weight, epsilon: (torch.empty_like(x), x.new_empty(x.shape[:-1]))
    )
    torch_has.cache_clear()
    return library


def model_of(shape: ModelShape, device: torch.device = META) -> PreTrainedModel:
    """Returns a model of these shapes in bfloat16, with any weights."""
    _fused_norms_on_meta()
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config_from(shape), attn_implementation=attention.NAME, dtype=torch.bfloat16
        )
    return model


class DecodingStep:
    """One pass of the built-in engine that computes logits for the next token of each sequence."""

    def __init__(self, shape: ModelShape, sequences: int, longest: int, device: torch.device = META) -> None:
        model = model_of(shape).requires_grad_(False)
        WeightBuffers(model, parameter_specs(model, {}), _ONE, 0, torch.bfloat16, device).allocate()
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
        self.device, self.forward = device, LlamaForward(model)
        self.places = np.random.default_rng(0).integers(longest // 4, longest, sequences)
        pages = -(-longest // PAGE)
        self.cache = DeviceCache(sequences * pages, PAGE)
        self.tables = np.arange(sequences * pages).reshape(sequences, pages)
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=device)

    def run(self) -> None:
        with torch.inference_mode():
            self._run()

    def _run(self) -> None:
        attention = PagedAttention(self.cache, self.places, self.places + 1, self.tables, self.device)
        self.forward(self.tokens, torch.from_numpy(self.places).to(self.device), attention, None)

    def launches(self) -> Launches:
        self.run()  # the cache is made once
        launches = Launches()
        with launches:
            self.run()
        return launches
