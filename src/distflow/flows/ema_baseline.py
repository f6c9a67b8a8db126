"""The moving averages of scores that the flow `rae` subtracts: state of a run."""

from typing import TYPE_CHECKING, Any

from distflow.algo.options import Decay
from distflow.flow import node
from distflow.roles.role import Role

if TYPE_CHECKING:
    from distflow.batch.batch import Batch
    from distflow.batch.context import Context


class EmaBaseline(Role):
    """A baseline for each value of the column `data_source`. Every worker sees all scores, and so has the same ones."""

    def __init__(self) -> None:
        self.baselines: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        return {"baselines": self.baselines}

    def restore(self, state: dict[str, Any]) -> None:
        self.baselines = dict(state["baselines"])

    @node(whole_batch=True, writes="advantage")
    def advantage(self, batch: "Batch", ctx: "Context", decay: Decay = 0.95) -> Any:
        """Subtracts from each score the baseline of its role, and takes the scores up in the order of samples."""
        import numpy as np
        import torch

        from distflow.algo.baselines import role_advantages

        order = np.argsort(batch.ids)
        roles = [str(r) for r in batch["data_source"]] if "data_source" in batch else ["all"] * len(batch)
        score = batch["score"]
        advantage, self.baselines = role_advantages(score[order], [roles[i] for i in order], self.baselines, decay)
        for role in sorted(set(roles)):
            ctx.metrics.log(f"advantage/{role}/baseline", self.baselines[role])
        ctx.metrics.log("advantage/mean", float(advantage.mean()), len(batch))
        ctx.metrics.log("reward/trained_mean", float(score.mean()), len(batch))
        return torch.empty_like(advantage).index_copy_(0, torch.from_numpy(order), advantage)
