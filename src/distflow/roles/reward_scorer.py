"""The model of a reward model: a value head scores a whole response."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.batch.branches import BRANCHES
from distflow.batch.response_mask import MASK
from distflow.errors import ConfigError
from distflow.model.source import Source
from distflow.model.text import Text, prompt_limit
from distflow.roles.context import RoleContext
from distflow.roles.second_model import source_of
from distflow.train.packing import RESPONSE
from distflow.train.trainer import TrainerOptions, make_trainer


class RewardScorer:
    """Scores whole responses: the value after the last token, for which one more token is appended.

    Of a sample with several sequences it scores the last one.
    """

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None) -> None:
        source = source_of(role, model)
        trainable = "update_pairs" in role.layouts
        if not trainable:
            check_reward_model(role.name, source)
        self.text = Text(source, prompt_limit(source, role.rollout.max_tokens, role.max_prompt), role.rendered)
        layout = role.layout("score", "update_pairs")
        assert layout is not None
        self.trainer = make_trainer(role, source.with_value_head(), layout, TrainerOptions(role.train, trainable))

    def score(self, batch: Batch) -> Tensor:
        """Returns one number per sample."""
        values = self.trainer.infer(with_appended_token(batch))
        return torch.stack([v[-1] for v in values]) if len(batch) else torch.zeros(0)


def check_reward_model(role: str, source: Source) -> None:
    """Raises unless a model has a head that gives a score."""
    if not source.has_value_head:
        raise ConfigError(
            f"role '{role}': '{source.name}' is no reward model, it has no value head;"
            " train one with `flow: reward_model`, or give a sequence-classification model with one label"
        )


def with_appended_token(batch: Batch) -> Batch:
    """Appends a token to every response: the value before it is that of the whole response."""
    responses: Ragged = batch[RESPONSE]
    lengths = responses.lengths + 1
    values = torch.zeros(int(lengths.sum()), dtype=responses.dtype)
    own = torch.ones(len(values), dtype=torch.bool)
    own[np.cumsum(lengths) - 1] = False
    values[own] = responses.joined()
    columns = {f: c for f, c in batch.columns.items() if f != MASK} | {RESPONSE: Ragged.packed(values, lengths)}
    if BRANCHES in batch:
        columns[MASK] = Ragged.packed(~own, lengths)  # of the value that is read
    return Batch(batch.ids, batch.groups, columns)
