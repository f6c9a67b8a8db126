"""A model's forward pass over the tokens of many sequences in one row, in the fastest way that fits the model."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from distflow.cpu import kernels_for
from distflow.cpu.llama_forward import CpuLlamaForward
from distflow.cpu.modules import packed_modules
from distflow.model.attention import Attention
from distflow.model.llama_family import is_llama_like
from distflow.rollout.builtin.llama_forward import LlamaForward


class Forward(Protocol):
    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        """Returns logits for tokens [n] at positions [n], of the rows in `keep` (None: of all)."""
        ...

    def packed_weights(self) -> AbstractContextManager[None]:
        """Surrounds calls. The weights may be in another memory layout then, and may not be read elsewhere."""
        ...


def forward_for(model: PreTrainedModel) -> Forward:
    """Chooses a forward pass for the weights that the model has now, and for threads like the calling one."""
    if not is_llama_like(model):
        return ModuleForward(model)
    if kernels_for(model.lm_head.weight):  # modules compute in kernels, too
        return CpuLlamaForward.for_model(model) or ModuleForward(model)
    return LlamaForward(model)


class ModuleForward:
    """Calls the model's own modules."""

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

    def packed_weights(self) -> AbstractContextManager[None]:
        return packed_modules(self.model)
