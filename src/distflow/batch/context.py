"""The context of a node's call, passed to a node that has a parameter named `ctx`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from distflow.batch.batch import Batch, Column
from distflow.plan.layout import Layout
from distflow.util.arrays import Ints

Reduce = Literal["mean", "sum", "max", "min"]


class MetricLog(Protocol):
    """Collects the metrics of one step on one worker."""

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        """Logs a value; a `mean` over all workers is weighted by `count`."""
        ...


class Recording(Protocol):
    """Records the work of a node for the page of the run: see distflow.observe.recorder."""

    def call(self, name: str, **details: Any) -> AbstractContextManager[dict[str, Any]]:
        """Records the code inside the `with` as a part of the node; its dict takes further details."""
        ...

    def sample(self, ids: Ints, columns: Mapping[str, Column]) -> None:
        """Records further fields of these samples, which the node does not write; most samples are not recorded."""
        ...


class NotRecorded:
    """A recording that keeps nothing."""

    def call(self, name: str, **details: Any) -> AbstractContextManager[dict[str, Any]]:
        return nullcontext(details)

    def sample(self, ids: Ints, columns: Mapping[str, Column]) -> None:
        return


NOT_RECORDED = NotRecorded()


class Chunks(Protocol):
    """The chunks of a node's samples; each may be sent before the others are complete, in any order."""

    @property
    def parts(self) -> Sequence[Ints]:
        """The places of each part's samples in the batch."""
        ...

    def leave(self, part: int, columns: Mapping[str, Column]) -> None:
        """Sends a part, with the fields that the node writes for its samples."""
        ...


class Partial(Protocol):
    """Samples of later steps that a generating node may begin, and the ones that it has begun."""

    @property
    def ahead(self) -> Batch:
        """Samples of this worker's replica in later steps, with the fields that the node reads."""
        ...

    @property
    def begun(self) -> Batch | None:
        """The argument of `carry` in the step before: samples of this step or of later ones."""
        ...

    def carry(self, begun: Batch) -> None:
        """Keeps partial results of some samples `ahead` for the next step, in columns of the node's choice."""
        ...


@dataclass(frozen=True)
class Context:
    """The step, the worker, and the layout of the node that is called."""

    step: int  # counted from 1, as in the console, the metrics and the checkpoints; 0: before training
    rank: int
    workers: int
    layout: Layout
    seed: int
    metrics: MetricLog
    folder: Path  # of the run
    groups: Ints  # ids of all prompts of the step, ascending
    record: Recording = NOT_RECORDED
    steps: int = 0  # of the whole run
    held_out: bool = False  # the node is part of an evaluation
    partial: Partial | None = None  # for a node that may begin samples of later steps
    upcoming: Callable[[int], Batch] | None = (
        None  # for a node that generates: so many samples of the next step, if any
    )
    chunks: Chunks | None = None  # for a node whose samples may leave before all are done

    @property
    def is_dp_leader(self) -> bool:
        """Returns whether this worker is the first rank of its replica, which alone writes its files and logs."""
        return any(replica[0] == self.rank for replica in self.layout.replicas)
