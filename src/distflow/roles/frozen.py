"""Roles with a model that is not trained, such as `reference`. Imports no torch: flows are planned without it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from distflow.algo.options import PositiveCount
from distflow.errors import ConfigError, DataError, shown, suggest
from distflow.flow.trace import node
from distflow.roles.context import RoleContext
from distflow.roles.role import Role
from distflow.roles.trained import OPTIONAL

if TYPE_CHECKING:
    from distflow.batch.batch import Batch, Ragged
    from distflow.dataset.view import DatasetView
    from distflow.train.trainer import Trainer

SOURCE_COLUMN = "data_source"
TOP = ("{role}_top_ids", "{role}_top_logprobs")


class FrozenModel(Role):
    """A model that is not trained, such as a teacher: `roles: {teacher: {model: …}}`."""

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: a model section as in a config; by default the model of the config."""
        self.role, self.trainer = role, _frozen_trainer(role, model)

    @node(type="inference", writes="{role}_logprobs", optional=OPTIONAL, ignores=SOURCE_COLUMN, sequence_parallel=True)
    def logprobs(self, batch: "Batch") -> "Ragged":
        """Computes log-probs of the response tokens; a role called `teacher` writes `teacher_logprobs`."""
        return self.trainer.infer(batch)

    @node(type="inference", writes=TOP, optional=OPTIONAL, ignores=SOURCE_COLUMN, sequence_parallel=True)
    def top_logprobs(self, batch: "Batch", k: PositiveCount) -> dict[str, Any]:
        """Computes the k likeliest tokens at the place of each response token, and their log-probs."""
        return top_fields(self.role, self.trainer.infer_top(batch, top_k(self.role, k)))


class Reference(FrozenModel):
    """The model as it was at the start, or another one."""

    @node(type="inference", writes="ref_logprobs", optional=OPTIONAL, sequence_parallel=True)
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self.trainer.infer(batch)


class Teachers(Role):
    """Several models that are not trained; the column `data_source` says which one computes for a sample:
    `roles: {teacher: {call: teachers, args: {models: {math: …, code: …}}}}`."""

    def __init__(self, role: RoleContext, models: Mapping[str, Any]) -> None:
        """`models`: value of the column → a model section as in a config, or a path."""
        if not isinstance(models, Mapping) or not models:
            raise ConfigError(f"role '{role.name}': `models` is {shown(models)}; give a model for each data_source")
        sections = {source: {"path": m} if isinstance(m, str) else m for source, m in models.items()}
        self.role, self.trainers = role, {source: _frozen_trainer(role, m) for source, m in sections.items()}

    def check_rows(self, rows: "DatasetView", rank: int, workers: int) -> None:
        if SOURCE_COLUMN not in rows.column_names:
            raise ConfigError(
                f"role '{self.role.name}': the data has no column '{SOURCE_COLUMN}', which says whose teacher a row"
                " has; rename one with data.rename"
            )
        for i in range(rank, len(rows), workers):
            if (source := rows[i][SOURCE_COLUMN]) not in self.trainers:
                raise DataError(f"{rows.location(i)}: {self._unknown(source)}")

    def _unknown(self, source: Any) -> str:
        return (
            f"role '{self.role.name}' has no teacher for data_source {shown(source)}"
            f"{suggest(str(source), self.trainers)}"
        )

    @node(type="inference", writes="{role}_logprobs", optional=OPTIONAL, sequence_parallel=True)
    def logprobs(self, batch: "Batch") -> "Ragged":
        return self._each(batch, lambda trainer, rows: [trainer.infer(rows)])[0]

    @node(type="inference", writes=TOP, optional=OPTIONAL, sequence_parallel=True)
    def top_logprobs(self, batch: "Batch", k: PositiveCount) -> dict[str, Any]:
        top = top_k(self.role, k)
        return top_fields(self.role, self._each(batch, lambda trainer, rows: trainer.infer_top(rows, top)))

    def _each(self, batch: "Batch", infer: "Callable[[Trainer, Batch], Sequence[Ragged]]") -> "Sequence[Ragged]":
        """Has each teacher compute for its samples; all ranks call all of them, whatever samples they have."""
        import numpy as np

        from distflow.batch.batch import concat, select

        sources = np.array(batch[SOURCE_COLUMN], dtype=object)
        parts = [(np.flatnonzero(sources == s), trainer) for s, trainer in self.trainers.items()]
        back = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")
        outputs = [infer(trainer, batch.select(rows)) for rows, trainer in parts]
        return [cast("Ragged", select(concat(columns), back)) for columns in zip(*outputs, strict=True)]


def top_k(role: RoleContext, k: int) -> Any:
    """Returns what to ask a teacher for: tokens that the trained model has as well."""
    from distflow.train.heads import TopK

    return TopK(k, role.model.config.get_text_config().vocab_size)


def top_fields(role: RoleContext, top: "Sequence[Ragged]") -> dict[str, Any]:
    return dict(zip((name.format(role=role.name) for name in TOP), top, strict=True))


def _frozen_trainer(role: RoleContext, model: Mapping[str, Any] | None) -> "Trainer":
    from distflow.roles.second_model import source_of
    from distflow.train.trainer import TrainerOptions, make_trainer

    layout = role.layout("logprobs", "top_logprobs")
    assert layout is not None
    return make_trainer(role, source_of(role, model), layout, TrainerOptions(role.train, trainable=False))
