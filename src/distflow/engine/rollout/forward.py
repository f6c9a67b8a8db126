"""A model's forward pass over tokens of many sequences in one row: in the best way there is for it here."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from distflow.engine.cpu.llama_forward import Compiled
from distflow.engine.model.attention import Attention
from distflow.engine.model.llama_family import known
from distflow.engine.rollout.llama_forward import Lean


class Forward(Protocol):
    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
        """Logits for tokens [n] at positions [n], of those that are wanted (None: of all)."""
        ...

    def ready(self) -> AbstractContextManager[None]:
        """Calls happen in here, in several threads if the model is `reentrant`; nobody else reads its weights."""
        ...


def forward_of(model: PreTrainedModel) -> Forward:
    """Made for the weights that the model has now, for threads like this one."""
    if not known(model):
        return Full(model)
    return Compiled.of(model) or Lean(model)


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

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()
