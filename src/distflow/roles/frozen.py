"""Roles with a model that is not trained, such as `reference`. Imports no torch: flows are planned without it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distflow.flow.trace import node
from distflow.roles.context import RoleContext
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged


class FrozenModel(Role):
    """A model that is not trained, such as a teacher: `roles: {teacher: {model: …}}`."""

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: a model section as in a config; by default the model of the config."""
        from distflow.roles.second_model import source_of
        from distflow.train.trainer import TrainerOptions, make_trainer

        layout = role.layout("logprobs")
        assert layout is not None
        self.trainer = make_trainer(role, source_of(role, model), layout, TrainerOptions(role.train, trainable=False))

    @node(type="inference", writes="{role}_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Computes log-probs of the response tokens; a role called `teacher` writes `teacher_logprobs`."""
        return self.trainer.infer(batch)


class Reference(FrozenModel):
    """The model as it was at the start, or another one."""

    @node(type="inference", writes="ref_logprobs")
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self.trainer.infer(batch)
