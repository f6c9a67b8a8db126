"""Models with a value head: the critic, with a value for every token, and the reward model, with one per response."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.batch.response_mask import MASK
from distflow.config.schema import TrainerConfig
from distflow.errors import ConfigError
from distflow.model.source import Source
from distflow.model.text import Text, prompt_limit
from distflow.roles.context import RoleContext
from distflow.roles.second_model import source_of
from distflow.train.packing import RESPONSE
from distflow.train.trainer import Trainer, make_trainer


class RewardScorer:
    """Scores whole responses: the value after the last token, for which a token is appended that nobody reads."""

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None) -> None:
        source = source_of(role, model)
        trainable = "update_pairs" in role.layouts
        if not trainable:
            check_reward_model(role.name, source)
        self.text = Text(source, prompt_limit(source, role.rollout.max_tokens, role.max_prompt))
        self.trainer = _trainer(role, source, ("score", "update_pairs"), role.train, trainable)

    def score(self, batch: Batch) -> Tensor:
        values = self.trainer.infer(with_appended_token(batch))
        return torch.stack([v[-1] for v in values]) if len(batch) else torch.zeros(0)


def critic_trainer(role: RoleContext) -> Trainer:
    source = source_of(role, role.critic.model)
    return _trainer(role, source, ("values", "update"), role.critic, "update" in role.layouts)


def _trainer(
    role: RoleContext, source: Source, methods: tuple[str, ...], config: TrainerConfig, trainable: bool
) -> Trainer:
    layout = role.layout(*methods)
    assert layout is not None
    return make_trainer(role, source.with_value_head(), layout, config, trainable)


def check_reward_model(role: str, source: Source) -> None:
    if not source.has_value_head:
        raise ConfigError(
            f"role '{role}': '{source.name}' is no reward model, it has no value head;"
            " train one with `flow: reward_model`, or give a sequence-classification model with one label"
        )


def with_appended_token(batch: Batch) -> Batch:
    """Appends a token to every response: the value before it is that of the whole response, whoever said it."""
    responses: Ragged = batch[RESPONSE]
    lengths = responses.lengths + 1
    values = torch.zeros(int(lengths.sum()), dtype=responses.dtype)
    own = np.ones(len(values), bool)
    own[np.cumsum(lengths) - 1] = False
    values[torch.from_numpy(own)] = responses.joined()
    columns = {f: c for f, c in batch.columns.items() if f != MASK}
    return Batch(batch.ids, batch.groups, {**columns, RESPONSE: Ragged.packed(values, lengths)})
