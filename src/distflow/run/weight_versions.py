"""Which weights are synced when, and the copies of those that were trained further since."""

from collections.abc import Mapping
from typing import Any

from distflow.comm.collectives import Communication
from distflow.errors import ConfigError
from distflow.plan.staleness import weight_version
from distflow.plan.tasks import Plan, Run, Weights
from distflow.roles.role import Role, defines


class WeightVersions:
    """The weights of one worker's roles, by version: version v is what v steps of training have made."""

    def __init__(self, rank: int, plan: Plan, roles: Mapping[str, Role], first: int = 0) -> None:
        """`first`: the steps before this run."""
        self.roles, self.delay, self.first = roles, plan.staleness, first
        self.keeps = plan.overlaps  # engines keep their weights until others come, and copies wait for them
        tasks = [t for t in plan.chain(rank) if isinstance(t, Weights | Run)]
        nodes = [plan.flow.node(t.node) for t in tasks if isinstance(t, Run)]
        self.generates = {n.role for n in nodes if n.generates}  # the roles that this worker generates with
        self.gives = sorted({t.role for t in tasks if isinstance(t, Weights)} - self.generates)
        synced = sorted({t.role for t in tasks if isinstance(t, Weights)})
        needs = [(role, "sync_weights", "a role that generates moves its weights first") for role in synced]
        if self.keeps:
            needs += [(role, "copy_weights", "rollout.staleness and rollout.chunk need copies") for role in self.gives]
        for role, method, why in needs:
            if not defines(type(roles[role]), method):
                raise ConfigError(f"roles.{role}: {why}, and {type(roles[role]).__name__} has no method `{method}`")

    def version(self, step: int) -> int:
        """Returns the version that a step generates with."""
        return weight_version(step, self.delay, self.first)

    def copy(self, role: str) -> Any:
        """Returns a copy of this worker's part of the weights of a role, as they are now."""
        return self.roles[role].copy_weights()

    def sync_weights(self, role: str, version: int, weights: Any = None) -> Communication[None]:
        """Hands weights over: a copy, or where there is none, the role's own."""
        yield from self.roles[role].sync_weights(version, weights)
