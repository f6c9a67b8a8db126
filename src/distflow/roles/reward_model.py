"""The role `reward_model`, a model that scores responses. Imports no torch: flows are planned without it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distflow.batch.scores import log_scores
from distflow.config.schema import TrainConfig
from distflow.errors import ConfigError
from distflow.flow.trace import node
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext
from distflow.roles.trained import TOKENS, Trained

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context
    from distflow.train.trainer import Trainer


class RewardModel(Trained):
    """A model with a value head, whose value of a whole response is its score."""

    trainer: "Trainer"

    def __init__(self, role: RoleContext, model: Mapping[str, Any] | None = None) -> None:
        """`model`: a model section as in a config; by default the model of the config."""
        from distflow.roles.reward_scorer import RewardScorer

        self.role, self.scorer = role, RewardScorer(role, model)
        self.trainer = self.scorer.trainer

    @staticmethod
    def check_training(config: TrainConfig, role: str, node: str, layout: Layout) -> None:
        if config.lora:
            raise ConfigError(f"train.lora: {node} trains a reward model, but adapters are for actors; remove it")

    @node(type="inference", reads=TOKENS, writes="score", optional="response_branches", sequence_parallel=True)
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        """Scores `response_tokens` as an answer to `prompt_tokens`."""
        score = self.scorer.score(batch)
        log_scores(ctx.metrics, score.tolist())
        return score

    @node(writes=(*TOKENS, "preferred"))
    def encode_pair(self, batch: "Batch") -> dict[str, Any]:
        """Encodes preference pairs; see `Actor.encode_pair`."""
        return self.scorer.text.encode_preferences(batch)

    @node(type="train", writes=(), balance="response_tokens", whole_groups=True, sequence_parallel=True)
    def update_pairs(self, batch: "Batch", ctx: "Context", loss: str = "preference", **params: Any) -> None:
        """Makes optimiser steps that raise the score of the chosen response above that of the rejected one."""
        from distflow.roles.reward_scorer import with_appended_token

        self._update(with_appended_token(batch), ctx, loss=loss, whole_groups=True, **params)
