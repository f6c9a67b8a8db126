"""Chunks that leave a worker while it generates the others."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow.data.balance import Ints
from distflow.data.batch import Column, select
from distflow.data.coordinator import Coordinator
from distflow.plan.tasks import Partition, Split


class Leaving:
    """The chunks of one call of a node that generates. `on_left` is called with each that has left."""

    def __init__(
        self, data: Coordinator, index: int, task: Split, samples: int, on_left: Callable[[Partition], None]
    ) -> None:
        self.data, self.index, self.task, self.on_left = data, index, task, on_left
        self.parts: list[Ints] = np.split(np.arange(samples), len(task.parts))
        self._left = 0

    def leave(self, columns: Mapping[str, Column]) -> None:
        part = self.task.parts[self._left]
        self._left += 1
        self.data.leave(self.index, self.task, part, columns)
        self.on_left(part)

    def rest(self, columns: Mapping[str, Any]) -> None:
        """Lets all chunks leave that have not, now that `columns` of the whole batch are there."""
        for places in self.parts[self._left :]:
            self.leave({f: select(columns[f], places) for f in self.task.fields if f in columns})
