"""The reward role of a run whose environment gives the rewards. Imports no torch: flows are planned without it."""

from typing import TYPE_CHECKING, Any

from distflow.flow import node

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context


class EnvironmentReward:
    """Scores a conversation with what its environment said at the end, and for its turns."""

    @node(type="inference", reads="env_reward", writes="score")
    def score(self, batch: "Batch", ctx: "Context") -> Any:
        score = batch["env_reward"]
        if len(batch):
            ctx.metrics.log("reward/mean", float(score.mean()), len(batch))
            ctx.metrics.log("reward/min", float(score.min()), reduce="min")
            ctx.metrics.log("reward/max", float(score.max()), reduce="max")
        return score
