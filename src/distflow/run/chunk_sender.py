"""Sends the chunks of a worker's samples while it generates the others."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow.batch.batch import Column, select
from distflow.coordinator.coordinator import Coordinator
from distflow.plan.tasks import Partition, Split
from distflow.util.arrays import Ints


class ChunkSender:
    """The chunks of one call of a node that generates. `send` is called with each that is complete."""

    def __init__(
        self, data: Coordinator, step: int, task: Split, samples: int, send: Callable[[Partition], None]
    ) -> None:
        self.data, self.step, self.task, self.send = data, step, task, send
        self.parts: list[Ints] = np.split(np.arange(samples), len(task.parts))
        self._sent: set[int] = set()

    def leave(self, part: int, columns: Mapping[str, Column]) -> None:
        """Sends a chunk before the node has returned."""
        self._sent.add(part)
        self.data.put_chunk(self.step, self.task, self.task.parts[part], columns)
        self.send(self.task.parts[part])

    def send_rest(self, columns: Mapping[str, Any]) -> None:
        """Sends all chunks that were not, now that `columns` of the whole batch are there."""
        for i, places in enumerate(self.parts):
            if i not in self._sent:
                self.leave(i, {f: select(columns[f], places) for f in self.task.fields if f in columns})
