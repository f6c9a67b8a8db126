"""Lets ranks that generate run ahead: all communication of a worker in a thread of its own, while its chain computes.

The thread does what the chain does together with other ranks, in an order that all ranks share: steps, then tasks, but
the weights of a step as soon as those that generate with them have sent what they have made in the step before. What
the chain sends it leaves to the thread and goes on; what it receives it waits for. A step needs nothing but what comes
before in that order, so nobody waits in a circle; and whoever generates waits for weights, so nobody is further ahead
than the plan's staleness. This also bounds buffering: as many steps of samples, and copies of weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Thread

import torch

from distflow.comm.collectives import Communication, all_reduce
from distflow.coordinator.coordinator import Coordinator
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan.staleness import weights_after
from distflow.plan.tasks import Move, Partition, Split, SyncWeights, Task, chunk_of
from distflow.run.evaluation import Evaluation
from distflow.run.link import Link
from distflow.run.mailbox import Mailbox
from distflow.run.worker import Worker

Waiting = Callable[[tuple[int, ...]], AbstractContextManager[None]]


class Overlap(Link):
    """The link of a worker whose communication has a thread of its own. `waiting` is entered with the ranks that the
    chain waits for; `run` carries out communication, in the thread only, and counts the bytes to each peer in `sent`.
    """

    def __init__(
        self,
        worker: Worker,
        evaluation: Evaluation | None,
        reducer: MetricsReducer,
        run: Callable[[Communication[None]], None],
        waiting: Waiting,
        stop_requested: Callable[[], bool] = lambda: False,
        sent: Counter[int] | None = None,
    ) -> None:
        super().__init__(worker.link.versions)
        self.handed = dict(worker.link.handed)
        self._handed_by_thread = dict(self.handed)
        self.worker, self.evaluation, self.reducer = worker, evaluation, reducer
        self.run, self.waiting, self.stop_requested = run, waiting, stop_requested
        self.sent = Counter() if sent is None else sent
        self.all_ranks = tuple(range(worker.plan.workers))
        self.mail = Mailbox()
        tasks, rank = weights_after(worker.plan), worker.rank
        # Tasks of the chain after which the next step begins for the thread, None: after all.
        self._early = None if tasks is None else sum(rank in t.ranks for t in worker.plan.tasks[:tasks])
        self._stop_step: int | None = None  # after which no chain goes on, as some worker was asked to stop
        self._complete: Counter[int] = Counter()  # batch of the data → its chunks that are complete here
        self._left: set[tuple[int, int, str]] = set()  # moves of chunks that were sent before the chain came to them
        for each in (worker, *([evaluation.worker] if evaluation else [])):
            each.link = self

    def start(self, first: int, last: int) -> None:
        """Starts the thread for the steps after `first` until `last`; it ends by itself."""
        self.first, self.last = first, last

        def communicate() -> None:
            try:
                self.run(self._communicate(first, last))
            except BaseException as e:
                self.mail.fail(e)

        Thread(target=communicate, name="overlap", daemon=True).start()  # daemon: it may wait for a lost peer

    # What the chain calls.

    def move(self, data: Coordinator, index: int, task: Move) -> Communication[None]:
        key = (id(data), index, task.id)
        if task.src.layout.replica_of(data.rank) is not None and key not in self._left:
            self.mail.put((*key, "sent"), data.outgoing(index, task))
        if task.dst.layout.replica_of(data.rank) is not None:
            with self.waiting(task.ranks):
                received = self.mail.take((*key, "received"))
            data.receive(index, task, received)
        self._left.discard(key)
        yield from ()

    def leave(self, data: Coordinator, index: int, part: Partition) -> None:
        assert part.chunk is not None
        chunk, count = part.chunk
        for task in self.worker.chunk_tasks[chunk]:
            if isinstance(task, Move) and task.src.id == part.id:
                self._left.add(key := (id(data), index, task.id))
                self.mail.put((*key, "sent"), data.outgoing(index, task))
        self.mail.put((id(data), index, "complete", self._complete[index]), chunk)
        self._complete[index] += 1
        if self._complete[index] == count:
            del self._complete[index]

    def order(self, data: Coordinator, index: int, task: Split) -> Iterator[int]:
        for place in range(len(task.parts)):
            if data.rank not in task.readers:  # it has made them and waits for none
                yield place
                continue
            with self.waiting(task.partition.layout.ranks):
                chunk: int = self.mail.take((id(data), index, "chunk", place))
            yield chunk

    def sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        if self.is_new(task.role, version) and task.role in self.versions.generates:
            self.mail.put((task.role, version, "weights"))
            with self.waiting(task.ranks):
                self.mail.take((task.role, version, "filled"))
        yield from ()

    def trained(self, version: int) -> None:
        generates = version == self.first or version + self.versions.delay < self.last
        if generates or (self.evaluation and self.evaluation.due(version)):
            for role in self.versions.gives:
                if self.handed.get(role) != version:
                    self.mail.put((role, version, "weights"), self.versions.copy(role))

    def end_step(self, data: Coordinator, index: int, metrics: StepMetrics) -> None:
        """Does nothing: the thread does it when it has done all of the step."""

    def after_chain(self, step: int, metrics: StepMetrics) -> None:
        """Gives the metrics of a step away as soon as they are complete: those ahead wait for all workers' to go on."""
        if not self._evaluates(step):
            self.mail.put((step, "metrics"), (metrics, self.stop_requested()))

    def reduce(self, reducer: MetricsReducer, step: int, metrics: StepMetrics, vote: bool) -> Communication[bool]:
        if self._evaluates(step):
            self.mail.put((step, "metrics"), (metrics, vote))
        with self.waiting(self.all_ranks):
            stop: bool = self.mail.take((step, "vote"))
        yield from ()
        return stop

    def _evaluates(self, step: int) -> bool:
        """Whether this worker has a part in the evaluation after a step."""
        return bool(self.evaluation and self.evaluation.due(step) and self.evaluation.worker.chain)

    # What the thread does.

    def _communicate(self, first: int, last: int) -> Communication[None]:
        """Goes through all steps in the order of `Worker.steps`, but for where a step begins."""
        for step in range(first + 1, last + self.versions.delay + 2):
            if not self._begins_early(step):
                yield from self._begin(step)
            if step <= last:
                yield from self._tasks(self.worker, step - 1, step)

    def _begins_early(self, step: int) -> bool:
        """Whether a step begins before the one before it is over. Not after an evaluation, which follows that."""
        due = self.evaluation is not None and self.evaluation.due(step - self.versions.delay - 1)
        return self._early is not None and self.first + 1 < step <= self.last + 1 and not due

    def _begin(self, step: int) -> Communication[None]:
        """Ends the step whose weights a step generates with, and hands them over."""
        ended = step - self.versions.delay - 1
        if ended > self.first:
            if self.evaluation and self.evaluation.due(ended):
                yield from self._tasks(self.evaluation.worker, ended, ended)
            metrics, vote = self.mail.take((ended, "metrics"))  # the chains are done with the step
            if self.evaluation:
                self.evaluation.worker.data.end_step(ended)
            metrics.traffic(self.worker.data.end_step(ended - 1))
            stop = yield from self.reducer.reduce(ended, metrics, vote)
            if stop and self._stop_step is None:
                self._stop_step = ended + self.versions.delay  # as `Job` does
            self.mail.put((ended, "vote"), stop)
            self.sent.clear()  # of no task
        if self._early is not None and step <= self.last and ended != self._stop_step:
            for task in (t for t in self.worker.chain if isinstance(t, SyncWeights)):
                yield from self._task(self.worker, step - 1, step, task)

    def _tasks(self, worker: Worker, index: int, step: int) -> Communication[None]:
        early = self._early if worker is self.worker else None
        for place, task in enumerate(worker.chain):
            if place == early and self._begins_early(step + 1):
                yield from self._begin(step + 1)
            if chunk_of(task) is None and not (early is not None and isinstance(task, SyncWeights)):
                yield from self._task(worker, index, step, task)
            if isinstance(task, Split):
                yield from self._chunks(worker, index, step, task)
        if early == len(worker.chain) and self._begins_early(step + 1):
            yield from self._begin(step + 1)

    def _chunks(self, worker: Worker, index: int, step: int, split: Split) -> Communication[None]:
        """Does the tasks of all chunks, in an order on which its ranks agree: as they become complete.

        In the r-th round every rank says which of its chunks are complete, once r of them are; those that are complete
        everywhere are next. So there are at most as many rounds as chunks, a few bytes in O(log N) messages each.
        """
        data, count, complete = worker.data, len(split.parts), list[int]()
        generates, order = split.partition.layout.replica_of(data.rank) is not None, list[int]()
        for r in range(count):
            mask = torch.ones(count, dtype=torch.uint8)
            if generates:
                while len(complete) < count and (
                    len(complete) <= r or self.mail.has((id(data), index, "complete", len(complete)))
                ):
                    complete.append(self.mail.take((id(data), index, "complete", len(complete))))
                mask[:] = 0
                mask[complete] = 1
            agreed = yield from all_reduce(data.rank, split.ranks, mask, torch.minimum)
            for chunk in (i for i in agreed.nonzero().flatten().tolist() if i not in order):
                if data.rank in split.readers:
                    self.mail.put((id(data), index, "chunk", len(order)), chunk)
                order.append(chunk)
                for task in worker.chunk_tasks[chunk]:
                    yield from self._task(worker, index, step, task)
            if len(order) == count:
                return

    def _task(self, worker: Worker, index: int, step: int, task: Task) -> Communication[None]:
        if isinstance(task, Move):
            yield from self._move(worker.data, index, task)
        elif isinstance(task, SyncWeights):
            yield from self._sync_weights(task, worker.version(step))
        worker.recorder.sent_by_thread(step, task, worker.plan, self.sent)

    def _move(self, data: Coordinator, index: int, task: Move) -> Communication[None]:
        key = (id(data), index, task.id)
        sends, receives = (p.layout.replica_of(data.rank) is not None for p in (task.src, task.dst))
        columns = self.mail.take((*key, "sent")) if sends else None
        received = yield from data.exchange(index, task, columns)
        if receives:
            self.mail.put((*key, "received"), received)

    def _sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        old, self._handed_by_thread[task.role] = self._handed_by_thread.get(task.role), version
        if old == version:
            return
        weights = self.mail.take((task.role, version, "weights"))
        yield from self.versions.sync_weights(task.role, version, weights)
        if task.role in self.versions.generates:
            self.mail.put((task.role, version, "filled"))
