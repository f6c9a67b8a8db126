"""The reward role of a run whose environment gives the rewards. Imports no torch: flows are planned without it."""

from typing import TYPE_CHECKING, Any

from distflow.batch.scores import log_scores
from distflow.flow import node
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context


class EnvironmentReward(Role):
    """Returns the rewards that the environment gave at the end of a conversation and for its turns."""

    @node(type="inference", reads="env_reward", writes="score")
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        score = batch["env_reward"]
        log_scores(ctx.metrics, score.tolist())
        return score
