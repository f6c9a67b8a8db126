"""The common base of trained roles. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distflow.plan.field_bytes import IMAGES, PROMPT_IMAGES, RESPONSE_IMAGES
from distflow.roles.context import RoleContext
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.train.trainer import Trainer
    from distflow.weights.state import RoleState

TOKENS = ("prompt_tokens", "response_tokens")
HISTORY = ("response_mask", "response_branches")  # which of them the model sampled, and in which sequences they are
EXPERTS = ("prompt_experts", "response_experts")  # that a mixture has chosen in the rollout
OPTIONAL = (*HISTORY, IMAGES, PROMPT_IMAGES, RESPONSE_IMAGES)  # what a pass of a model also reads where it is


class Trained(Role):
    """A role with a trainer, which updates it and whose state a checkpoint keeps."""

    role: RoleContext
    trainer: "Trainer | None"  # on ranks that only generate there is none

    def _update(self, batch: "Batch", ctx: "Context", **params: Any) -> None:
        from distflow.train.update_spec import update_spec

        assert self.trainer is not None
        self.trainer.update(batch, update_spec(self.role, **params), ctx)

    def state(self) -> "RoleState | None":
        from distflow.model.description import describe

        trainer = self.trainer
        if trainer is None or not trainer.trainable:
            return None
        description = partial(describe, source=trainer.source, adapter=trainer.adapter)
        return replace(trainer.state(), describe=description)

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.trainer is not None and self.trainer.trainable:
            self.trainer.restore(state)
