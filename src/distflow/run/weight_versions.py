"""Which weights are synced when, and the copies of those that were trained further since."""

from collections.abc import Mapping
from typing import Any

from distflow.comm.collectives import Communication
from distflow.errors import ConfigError
from distflow.plan.staleness import weight_version
from distflow.plan.tasks import Plan, RunNode, SyncWeights


class WeightVersions:
    """The weights of one worker's roles, by version: version v is what v steps of training have made."""

    def __init__(self, rank: int, plan: Plan, roles: Mapping[str, Any], first: int = 0) -> None:
        """`first`: the steps before this run."""
        self.roles, self.delay, self.first = roles, plan.staleness, first
        self.keeps = plan.overlaps  # engines keep their weights until others come, and copies wait for them
        tasks = [t for t in plan.chain(rank) if isinstance(t, SyncWeights | RunNode)]
        nodes = [plan.flow.node(t.node) for t in tasks if isinstance(t, RunNode)]
        self.generates = {n.role for n in nodes if n.generates}  # the roles that this worker generates with
        self.gives = sorted({t.role for t in tasks if isinstance(t, SyncWeights)} - self.generates)
        for role in self.gives:
            if self.keeps and not hasattr(roles[role], "copy_weights"):
                raise ConfigError(
                    f"roles.{role}: rollout.staleness and rollout.chunk need copies of weights, and"
                    f" {type(roles[role]).__name__} has no method `copy_weights()`"
                )

    def version(self, step: int) -> int:
        """Returns the version that a step generates with."""
        return weight_version(step, self.delay, self.first)

    def copy(self, role: str) -> Any:
        """Returns a copy of this worker's part of the weights of a role, as they are now."""
        return self.roles[role].copy_weights()

    def sync_weights(self, role: str, version: int, weights: Any = None) -> Communication[None]:
        """Hands weights over: a copy, or where there is none, the role's own."""
        yield from self.roles[role].sync_weights(version, weights)
