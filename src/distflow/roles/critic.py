"""The role `critic`, a value model. Imports no torch: flows are planned without it."""

from typing import TYPE_CHECKING, Any

from distflow.flow.trace import node
from distflow.roles.context import RoleContext
from distflow.roles.trained import OPTIONAL, Trained

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged
    from distflow.batch.context import Context
    from distflow.train.trainer import Trainer


class Critic(Trained):
    """A model of its own with a value head, which learns the expected return of every token."""

    trainer: "Trainer"

    def __init__(self, role: RoleContext) -> None:
        from distflow.roles.second_model import source_of
        from distflow.train.trainer import TrainerOptions, make_trainer

        layout = role.layout("values", "update")
        assert layout is not None
        source = source_of(role, role.critic.model).with_value_head()
        options = TrainerOptions(role.critic, trainable="update" in role.layouts)
        self.role, self.trainer = role, make_trainer(role, source, layout, options)

    @node(type="inference", writes="old_values", optional=OPTIONAL, sequence_parallel=True)
    def values(self, batch: "Batch") -> "Ragged":
        """Computes the value of the state before each response token, under the weights of this step."""
        return self.trainer.infer(batch)

    @node(type="train", writes=(), balance="response_tokens", optional=OPTIONAL, sequence_parallel=True)
    def update(self, batch: "Batch", ctx: "Context", loss: str = "value", **params: Any) -> None:
        """Makes optimiser steps towards the field `returns`; see `Actor.update`."""
        self._update(batch, ctx, loss=loss, **params)
