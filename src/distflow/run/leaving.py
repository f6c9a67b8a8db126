"""Chunks that leave a worker while it generates the others."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow.batch.batch import Column, select
from distflow.coordinator.coordinator import Coordinator
from distflow.plan.tasks import Partition, Split
from distflow.util.arrays import Ints


class Leaving:
    """The chunks of one call of a node that generates. `on_left` is called with each that has left."""

    def __init__(
        self, data: Coordinator, index: int, task: Split, samples: int, on_left: Callable[[Partition], None]
    ) -> None:
        self.data, self.index, self.task, self.on_left = data, index, task, on_left
        self.parts: list[Ints] = np.split(np.arange(samples), len(task.parts))
        self._left: set[int] = set()

    def leave(self, part: int, columns: Mapping[str, Column]) -> None:
        self._left.add(part)
        self.data.leave(self.index, self.task, self.task.parts[part], columns)
        self.on_left(self.task.parts[part])

    def rest(self, columns: Mapping[str, Any]) -> None:
        """Lets all chunks leave that have not, now that `columns` of the whole batch are there."""
        for i, places in enumerate(self.parts):
            if i not in self._left:
                self.leave(i, {f: select(columns[f], places) for f in self.task.fields if f in columns})
