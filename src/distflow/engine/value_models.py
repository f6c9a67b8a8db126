"""Models with one number for a head: the critic, which tells it of every token, and the reward model, of the last."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.config import Config
from distflow.config.schema import LearnConfig, ModelConfig
from distflow.data.batch import Batch, Ragged
from distflow.engine.model.source import Source, open_model
from distflow.engine.model.text import Text
from distflow.engine.policy import one_layout, part_of, prompt_limit, source_of, trainer_of, update, with_column
from distflow.engine.role_context import RoleContext
from distflow.errors import ConfigError
from distflow.run.checkpoint import Part
from distflow.run.worker import Context

RESPONSE = "response_tokens"


class ValueModel:
    """One rank's part of it; `learns` None: it is only asked."""

    def __init__(
        self, setup: RoleContext, source: Source, methods: tuple[str, ...], learns: LearnConfig | None
    ) -> None:
        self.setup, self.source = setup, source
        layout = one_layout(setup, methods)
        assert layout is not None
        self.trainer = trainer_of(setup, source, layout, learns)

    def part(self) -> Part | None:
        return part_of(self.trainer, self.source) if self.trainer.config else None

    def update(self, batch: Batch, ctx: Context, how: Mapping[str, Any]) -> None:
        update(self.setup, self.trainer, batch, ctx, **how)


class Judge(ValueModel):
    """Scores whole responses. The last token is read, too, so it is followed by one that nobody looks at."""

    def __init__(self, setup: RoleContext, source: Source, learns: LearnConfig | None) -> None:
        super().__init__(setup, source, ("score", "update_pairs"), learns)
        self.text = Text(source, prompt_limit(setup.config, source))

    def score(self, batch: Batch, ctx: Context) -> Tensor:
        values = self.trainer.ask(_one_more(batch))
        score = torch.stack([v[-1] for v in values]) if len(batch) else torch.zeros(0)
        if len(batch):
            ctx.metrics.log("reward/mean", float(score.mean()), len(batch))
            ctx.metrics.log("reward/min", float(score.min()), reduce="min")
            ctx.metrics.log("reward/max", float(score.max()), reduce="max")
        return score

    def update_pairs(self, batch: Batch, ctx: Context, how: Mapping[str, Any]) -> None:
        update(self.setup, self.trainer, _one_more(batch), ctx, together=True, **how)


def critic(setup: RoleContext) -> ValueModel:
    config = setup.config
    given = config.critic.model
    source = open_other(setup.role, given, config, setup.source) if given else source_of(setup)
    learns = config.critic if "update" in setup.layouts else None
    return ValueModel(setup, source.of_values(), ("values", "update"), learns)


def reward_model(setup: RoleContext, model: Mapping[str, Any] | None) -> Judge:
    given = ModelConfig(**model) if model else None
    source = open_other(setup.role, given, setup.config, setup.source) if given else source_of(setup)
    learns = setup.config.train if "update_pairs" in setup.layouts else None
    if learns is None:
        check_judge(setup.role, source)
    return Judge(setup, source.of_values(), learns)


def check_judge(role: str, source: Source) -> None:
    if not source.has_head:
        raise ConfigError(
            f"role '{role}': '{source.name}' is no reward model, it has no head that gives one number;"
            " train one with `flow: reward_model`, or give a sequence-classification model with one label"
        )


def open_other(role: str, given: ModelConfig, config: Config, main: Source | None) -> Source:
    """Another model than the config's; it reads the same tokens."""
    if given.path is None:
        raise ConfigError(f"role '{role}': its model is given by `path`; only the main one is made on the spot")
    source = open_model(given, lambda: iter(()), config.base, config.seed)
    if main is not None and not main.tokenizer.get_vocab().items() <= source.tokenizer.get_vocab().items():
        raise ConfigError(
            f"role '{role}': '{source.name}' has another vocabulary than '{main.name}', and reads its tokens;"
            " give a model of the same family, or write a node that encodes the text anew"
        )
    return source


def _one_more(batch: Batch) -> Batch:
    """Every response followed by a token, whose place tells of all that stands before it."""
    responses: Ragged = batch[RESPONSE]
    lengths = responses.lengths + 1
    values = torch.zeros(int(lengths.sum()), dtype=responses.dtype)
    own = np.ones(len(values), bool)
    own[np.cumsum(lengths) - 1] = False
    values[torch.from_numpy(own)] = responses.joined()
    return with_column(batch, RESPONSE, Ragged.packed(values, lengths))
