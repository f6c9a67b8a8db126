"""The context of a node's call, passed to a node that has a parameter named `ctx`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from distflow.data.balance import Ints
from distflow.plan.layout import Layout

Reduce = Literal["mean", "sum", "max", "min"]


class MetricLog(Protocol):
    """Collects the metrics of one step on one worker."""

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        """Logs a value; a `mean` over all workers is weighted by `count`."""
        ...


@dataclass(frozen=True)
class Context:
    """The step, the worker, and the layout of the node that is called."""

    step: int
    rank: int
    workers: int
    layout: Layout
    seed: int
    metrics: MetricLog
    folder: Path  # of the run
    groups: Ints  # ids of all prompts of the step, ascending

    @property
    def lead(self) -> bool:
        """Whether this worker is the first rank of its cell: it alone writes files and logs for the cell."""
        return any(cell[0] == self.rank for cell in self.layout.cells)
