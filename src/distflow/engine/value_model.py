"""Models with a value head: the critic, with a value for every token, and the reward model, with one per response."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.config.schema import ModelConfig, TrainerConfig
from distflow.data.batch import Batch, Ragged
from distflow.engine.model.source import Source, open_model
from distflow.engine.model.text import Text, prompt_limit
from distflow.engine.role_context import RoleContext
from distflow.engine.train.packing import RESPONSE
from distflow.engine.train.trainer import Trainer, make_trainer
from distflow.errors import ConfigError


class RewardScorer:
    """Scores whole responses: the value after the last token, for which a token is appended that nobody reads."""

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None) -> None:
        source = _source(role, ModelConfig(**model) if model else None)
        trainable = "update_pairs" in role.layouts
        if not trainable:
            check_reward_model(role.name, source)
        self.text = Text(source, prompt_limit(source, role.rollout.max_tokens, role.max_prompt))
        self.trainer = _trainer(role, source, ("score", "update_pairs"), role.train, trainable)

    def score(self, batch: Batch) -> Tensor:
        values = self.trainer.infer(with_appended_token(batch))
        return torch.stack([v[-1] for v in values]) if len(batch) else torch.zeros(0)


def critic_trainer(role: RoleContext) -> Trainer:
    source = _source(role, role.critic.model)
    return _trainer(role, source, ("values", "update"), role.critic, "update" in role.layouts)


def _source(role: RoleContext, given: ModelConfig | None) -> Source:
    return open_second_model(role.name, given, role.base, role.seed, role.source) if given else role.model


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


def open_second_model(role: str, given: ModelConfig, base: Path, seed: int, main: Source | None) -> Source:
    """Opens another model than the config's; it reads the same tokens."""
    if given.path is None:
        raise ConfigError(f"role '{role}': its model is given by `path`; only the main model may have random weights")
    source = open_model(given, lambda: iter(()), base, seed)
    if main is not None and not main.tokenizer.get_vocab().items() <= source.tokenizer.get_vocab().items():
        raise ConfigError(
            f"role '{role}': '{source.name}' has another vocabulary than '{main.name}', and reads its tokens;"
            " give a model of the same family, or write a node that encodes the text anew"
        )
    return source


def with_appended_token(batch: Batch) -> Batch:
    """Appends a token to every response: the value before it is that of the whole response."""
    responses: Ragged = batch[RESPONSE]
    lengths = responses.lengths + 1
    values = torch.zeros(int(lengths.sum()), dtype=responses.dtype)
    own = np.ones(len(values), bool)
    own[np.cumsum(lengths) - 1] = False
    values[torch.from_numpy(own)] = responses.joined()
    return Batch(batch.ids, batch.groups, {**batch.columns, RESPONSE: Ragged.packed(values, lengths)})
