"""Communicates for a worker's chain: at once, in the chain's own thread. `async_comm` has another way."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from distflow.comm.collectives import Communication, all_reduce
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.curriculum import Curriculum
from distflow.errors import ConfigError
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan.tasks import Move, Partition, Plan, Resample, RunNode, Split, SyncWeights
from distflow.roles.role import Role, defines
from distflow.run.versions import Versions


class Comm:
    """Carries out what a chain does together with other ranks, when it comes to it.

    With a delay it keeps copies of the weights that were trained further before they were synced.
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        roles: Mapping[str, Role],
        versions: Versions,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.roles, self.versions, self.rank = roles, versions, rank
        self.all_ranks, self.curriculum = tuple(range(plan.workers)), curriculum
        self.keeps_weights = plan.overlaps  # engines keep their weights until others come, and copies wait for them
        tasks = [t for t in plan.chain(rank) if isinstance(t, SyncWeights | RunNode)]
        nodes = [plan.flow.node(t.node) for t in tasks if isinstance(t, RunNode)]
        self.generating = {n.role for n in nodes if n.generates}  # the roles that this worker generates with
        self.sending = sorted({t.role for t in tasks if isinstance(t, SyncWeights)} - self.generating)
        self.synced: dict[str, int] = {}  # role → the version that its engines have
        self._copies: dict[int, dict[str, Any]] = {}  # version → role → this worker's part of the weights
        synced = sorted({t.role for t in tasks if isinstance(t, SyncWeights)})
        needs = [(role, "sync_weights", "a role that generates moves its weights first") for role in synced]
        if self.keeps_weights:
            needs += [
                (role, "copy_weights", "rollout.staleness and rollout.chunk need copies") for role in self.sending
            ]
        for role, method, why in needs:
            if not defines(type(roles[role]), method):
                raise ConfigError(f"roles.{role}: {why}, and {type(roles[role]).__name__} has no method `{method}`")

    def move(self, data: Coordinator, step: int, task: Move) -> Communication[None]:
        """Moves fields of a step."""
        yield from data.move(step, task)

    def resample(self, data: Coordinator, step: int, task: Resample, number: int) -> Communication[bool]:
        """Ends a round of dynamic sampling, the `number`-th of the step; returns whether the step is full."""
        full = yield from data.resample(step, task)
        return full

    def send_chunk(self, data: Coordinator, step: int, part: Partition) -> None:
        """Sends a chunk that is complete. Here its moves have to wait until the chain comes to them."""

    def chunk_order(self, data: Coordinator, step: int, task: Split) -> Iterable[int]:
        """Returns the chunks in the order in which this worker's chain runs their tasks."""
        return range(len(task.parts))

    def sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        """Brings a version to the engines, from a copy if the weights were trained further."""
        if not self.is_new(task.role, version):
            return
        self._copies = {v: weights for v, weights in self._copies.items() if v >= version}
        yield from self.roles[task.role].sync_weights(version, self._copies.get(version, {}).get(task.role))

    def is_new(self, role: str, version: int) -> bool:
        """Notes that a version is synced. Returns False if the engines have it and keep it."""
        old, self.synced[role] = self.synced.get(role), version
        return not self.keeps_weights or old != version

    def trained(self, version: int) -> None:
        """Notes that this worker has trained its part of a version."""
        if self.keeps_weights:
            self._copies[version] = {role: self.roles[role].copy_weights() for role in self.sending}

    def after_chain(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step when this worker has done its part of it."""

    def end_step(self, data: Coordinator, step: int, metrics: StepMetrics) -> None:
        """Ends a step whose tasks are all done, and logs its traffic."""
        metrics.traffic(data.end_step(step))

    def reduce(self, reducer: MetricsReducer, step: int, metrics: StepMetrics, vote: bool) -> Communication[bool]:
        """Reduces the metrics of a step over all workers; returns whether any of them votes to stop."""
        if self.curriculum and step:
            yield from self._learn(self.curriculum, step, metrics)
        stop = yield from reducer.reduce(step, metrics, vote)
        if stop:
            self.versions.stop_after(step)
        return stop

    def _learn(self, curriculum: Curriculum, step: int, metrics: StepMetrics) -> Communication[None]:
        """Tells all workers how the responses of a step did, which may decide on the prompts of later ones."""
        own = torch.from_numpy(curriculum.own_results(step - 1))
        results = yield from all_reduce(self.rank, self.all_ranks, own, torch.add)
        curriculum.learn(step - 1, results.numpy())
        for name, value in curriculum.metrics(step - 1).items() if not self.rank else ():
            metrics.log(name, value)
