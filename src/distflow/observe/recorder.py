"""Records the spans of one worker's tasks, and some samples. See spans.py and samples.py for the files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.batch.batch import Batch, Column
from distflow.batch.context import NOT_RECORDED, Context, Recording
from distflow.observe.bounded_log import BoundedLog
from distflow.observe.samples import Pictures, Pieces, SampleRecorder, as_columns, choose
from distflow.observe.spans import SpanRecorder
from distflow.observe.splits import HELD_OUT, TRAIN
from distflow.plan.tasks import Load, Move, Plan, Resample, RunNode, SyncWeights, Task
from distflow.util.arrays import Ints

Details = AbstractContextManager[dict[str, Any]]


@dataclass(frozen=True)
class Recorder:
    """Records the tasks of one chain; `split` says whether its samples are trained on or held out."""

    spans: SpanRecorder | None = None
    samples: SampleRecorder | None = None
    split: str = TRAIN

    @classmethod
    def make(
        cls,
        folder: Path,
        rank: int,
        sent: Counter[int],
        spans: bool,
        samples: int,
        pieces: Pieces | None,
        pictures: Pictures | None = None,
    ) -> "Recorder":
        """Makes the recorder of a worker. `samples`: how many of a step are recorded, on all workers together."""
        return cls(
            SpanRecorder(folder, rank, sent) if spans else None,
            SampleRecorder(folder, rank, samples, pieces, pictures) if samples else None,
        )

    def held_out(self) -> "Recorder":
        """Returns a recorder of the evaluation, which writes to the same files."""
        return replace(self, split=HELD_OUT)

    def open(self, now: float, first: int, workers: int) -> None:
        """Starts to record; see SpanRecorder.open. A run of more `workers` may have been before this one."""
        if self.spans:
            self.spans.open(now, first)
        if self.samples:
            self.samples.log.open(first)
        for recorder in (self.spans, self.samples):
            if recorder and first:
                _remove_later(recorder.log, first, workers)

    def waited(self, ranks: tuple[int, ...], seconds: float) -> None:
        if self.spans:
            self.spans.waited(ranks, seconds)

    def task(self, step: int, task: Task, plan: Plan) -> Details:
        """Records a task of the chain."""
        kind, name = task_kind(task, plan), task.id if isinstance(task, Move) else task.name
        return self.span(step, kind, name) if kind else nullcontext({})

    def span(self, step: int, kind: str, name: str) -> Details:
        """Records a span around the block."""
        if not self.spans:
            return nullcontext({})
        return self.spans.task(step, kind, name, **self._split)

    def sent_by_thread(self, step: int, task: Task, plan: Plan, sent: Counter[int]) -> None:
        """Records what a thread besides the chain has sent for a task of the chain."""
        kind, name = task_kind(task, plan), task.id if isinstance(task, Move) else task.name
        if self.spans and kind:
            self.spans.sent_by_thread(step, kind, name, sent, **self._split)

    @property
    def _split(self) -> dict[str, str]:
        return {} if self.split == TRAIN else {"split": self.split}

    def node(self, context: Context, repeat: int) -> Recording:
        """Returns the recording of one node's call; of a replica only the leading worker records samples."""
        return _NodeRecording(self, context, repeat) if self.spans or self.samples else NOT_RECORDED

    def outputs(
        self, record: Recording, loaded: Sequence[str], writes: Sequence[str], batch: Batch, result: Any
    ) -> None:
        """Records the fields that a node wrote, and those it read that were `loaded` from the data."""
        if self.samples:
            source = {f: c for f, c in batch.columns.items() if f in loaded}
            record.sample(batch.ids, source | as_columns(result, writes))

    def end_step(self, step: int, **details: Any) -> None:
        """Writes all that is not yet written."""
        if self.spans:
            self.spans.end_step(step, **details)
        if self.samples:
            self.samples.flush()

    def fail(self, step: int, message: str) -> None:
        """Records why this worker ends before the run is over."""
        if self.spans:
            self.spans.fail(step, message)
        if self.samples:
            self.samples.flush()

    def close(self) -> None:
        for recorder in (self.spans, self.samples):
            if recorder:
                recorder.flush()
                recorder.log.close()


NO_RECORDER = Recorder()


class _NodeRecording:
    def __init__(self, recorder: Recorder, context: Context, repeat: int) -> None:
        self.recorder, self.step, self.repeat = recorder, context.step, repeat
        samples = recorder.samples if context.is_dp_leader else None
        self.chosen = choose(context.groups, repeat, samples.per_step if samples else 0)

    def call(self, name: str, **details: Any) -> Details:
        spans = self.recorder.spans
        return spans.call(self.step, name, **details) if spans else nullcontext(details)

    def sample(self, ids: Ints, columns: Mapping[str, Column]) -> None:
        if len(self.chosen) and self.recorder.samples:
            self.recorder.samples.add(self.step, self.recorder.split, self.chosen, ids, self.repeat, columns)


def _remove_later(log: BoundedLog, first: int, workers: int) -> None:
    """Removes lines of steps after `first` from files of ranks that are no more, each of which falls to one rank."""
    rank = int(log.path.stem) + workers
    while (path := log.path.with_stem(str(rank))).exists():
        old = BoundedLog(path, log.limit, log.step_of)
        old.open(first)
        old.close()
        rank += workers


def task_kind(task: Task, plan: Plan) -> str | None:
    """Returns the kind of a task's span; None if it has none."""
    match task:
        case Load():
            return "load"
        case Move():
            return "move"
        case SyncWeights():
            return "weights"
        case Resample():
            return "resample"
        case RunNode():
            return plan.flow.node(task.node).type
        case _:
            return None  # freeing takes no time
