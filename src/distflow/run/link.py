"""How a worker's chain communicates: at once, in its own thread. `overlap` has another way."""

from collections.abc import Iterable
from typing import Any

from distflow.comm.collectives import Communication
from distflow.coordinator.coordinator import Coordinator
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan.tasks import Move, Partition, Split, SyncWeights
from distflow.run.weight_versions import WeightVersions


class Link:
    """Carries out what a chain does together with other ranks, when it comes to it.

    With a delay it keeps copies of the weights that were trained further before they were synced.
    """

    def __init__(self, versions: WeightVersions) -> None:
        self.versions = versions
        self.handed: dict[str, int] = {}  # role → the version that its engines have
        self._copies: dict[int, dict[str, Any]] = {}  # version → role → this worker's part of the weights

    def move(self, data: Coordinator, index: int, task: Move) -> Communication[None]:
        """Moves fields of a batch of the data, counted from 0."""
        yield from data.move(index, task)

    def leave(self, data: Coordinator, index: int, part: Partition) -> None:
        """Is called when a chunk is complete. Here its moves have to wait until the chain comes to them."""

    def order(self, data: Coordinator, index: int, task: Split) -> Iterable[int]:
        """Returns the chunks in the order in which this worker's chain runs their tasks."""
        return range(len(task.parts))

    def sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        if not self.is_new(task.role, version):
            return
        self._copies = {v: weights for v, weights in self._copies.items() if v >= version}
        yield from self.versions.sync_weights(task.role, version, self._copies.get(version, {}).get(task.role))

    def is_new(self, role: str, version: int) -> bool:
        """Notes that a version is synced. Returns False if the engines have it and keep it."""
        old, self.handed[role] = self.handed.get(role), version
        return not self.versions.keeps or old != version

    def trained(self, version: int) -> None:
        """Is called when this worker has trained its part of a version."""
        if self.versions.keeps:
            self._copies[version] = {role: self.versions.copy(role) for role in self.versions.gives}

    def end_step(self, data: Coordinator, index: int, metrics: StepMetrics) -> None:
        """Ends a batch of the data whose tasks are all done, and logs its traffic."""
        metrics.traffic(data.end_step(index))

    def reduce(self, reducer: MetricsReducer, step: int, metrics: StepMetrics, vote: bool) -> Communication[bool]:
        """Reduces the metrics of a step over all workers; returns whether any of them votes to stop."""
        return (yield from reducer.reduce(step, metrics, vote))
