"""Lets ranks that generate run ahead: all communication of a worker in a thread of its own, while its chain computes.

The thread does what the chain does together with other ranks, in an order that all ranks share: steps, then tasks, but
the weights of a step as soon as the ranks that generate with them have sent what they made in the step before. What the
chain sends it leaves to the thread and goes on; what it receives it waits for. A step needs nothing but what comes
before in that order, so no ranks wait in a circle; and ranks that generate wait for weights, so none is further ahead
than the plan's staleness. This also bounds buffering: to that many steps of samples, and copies of weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Thread

import torch

from distflow.comm.collectives import Communication, all_reduce
from distflow.comm.streams import CPU, finish, own_stream
from distflow.coordinator.coordinator import Coordinator
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan.staleness import weights_after
from distflow.plan.tasks import Move, Partition, Resample, Split, SyncWeights, Task, chunk_of
from distflow.run.comm import Comm
from distflow.run.evaluation import Evaluation
from distflow.run.mailbox import Mailbox
from distflow.run.worker import Worker, split_at_resample


@dataclass(frozen=True)
class CommThread:
    """The transport of a worker's thread, and how its chain waits for it."""

    run: Callable[[Communication[None]], None]  # carries out communication, in the thread only
    sent: Counter[int] = field(default_factory=Counter)  # the bytes that `run` has sent to each peer
    waiting: Callable[[tuple[int, ...]], AbstractContextManager[None]] = lambda ranks: nullcontext()  # for the chain
    stop_requested: Callable[[], bool] = lambda: False
    device: torch.device = CPU  # of the worker


class AsyncComm(Comm):
    """The communication of a worker in a thread of its own. Continues what the worker's `Comm` has begun."""

    def __init__(
        self, worker: Worker, evaluation: Evaluation | None, reducer: MetricsReducer, thread: CommThread
    ) -> None:
        before = worker.comm
        super().__init__(worker.rank, worker.plan, before.roles, before.versions, before.curriculum)
        self.synced = dict(worker.comm.synced)
        self._synced_by_thread = dict(self.synced)
        self.worker, self.evaluation, self.reducer, self.thread = worker, evaluation, reducer, thread
        self.waiting = thread.waiting
        self.mail = Mailbox(thread.device)
        tasks, rank = weights_after(worker.plan), worker.rank
        # Tasks of the chain after which the next step begins for the thread, None: after all.
        self._early = None if tasks is None else sum(rank in t.ranks for t in worker.plan.tasks[:tasks])
        # Whether the chain has a part in the rounds of dynamic sampling; else the thread does not wait for it.
        self._samples = bool(split_at_resample(worker.chain)[0])
        self._complete: Counter[int] = Counter()  # step → its chunks that are complete here
        self._sent: set[tuple[int, int, str]] = set()  # moves of chunks that were sent before the chain came to them
        for each in (worker, *([evaluation.worker] if evaluation else [])):
            each.comm = self

    def start(self) -> None:
        """Starts the thread for all steps of the run; it ends by itself."""

        def communicate() -> None:
            try:
                with own_stream(self.thread.device):
                    self.thread.run(self._communicate())
            except BaseException as e:
                self.mail.fail(e)

        Thread(target=communicate, name="communication", daemon=True).start()  # daemon: it may wait for a lost peer

    # What the chain calls.

    def move(self, data: Coordinator, step: int, task: Move) -> Communication[None]:
        key = (id(data), step, task.id)
        if task.src.layout.replica_of(data.rank) is not None and key not in self._sent:
            self.mail.put((*key, "sent"), data.outgoing(step, task))
        if task.dst.layout.replica_of(data.rank) is not None:
            with self.waiting(task.ranks):
                received = self.mail.take((*key, "received"))
            data.receive(step, task, received)
        self._sent.discard(key)
        yield from ()

    def resample(self, data: Coordinator, step: int, task: Resample, number: int) -> Communication[bool]:
        key = (id(data), step, "round", number)
        if self._samples:
            self.mail.put((*key, "sampled"))
        with self.waiting(task.ranks):
            full: bool = self.mail.take((*key, "full"))
        yield from ()
        return full

    def send_chunk(self, data: Coordinator, step: int, part: Partition) -> None:
        assert part.chunk is not None
        chunk, count = part.chunk
        for task in self.worker.chunk_tasks[chunk]:
            if isinstance(task, Move) and task.src.id == part.id:
                self._sent.add(key := (id(data), step, task.id))
                self.mail.put((*key, "sent"), data.outgoing(step, task))
        self.mail.put((id(data), step, "complete", self._complete[step]), chunk)
        self._complete[step] += 1
        if self._complete[step] == count:
            del self._complete[step]

    def chunk_order(self, data: Coordinator, step: int, task: Split) -> Iterator[int]:
        for place in range(len(task.parts)):
            if data.rank not in task.readers:  # it has made them and waits for none
                yield place
                continue
            with self.waiting(task.partition.layout.ranks):
                chunk: int = self.mail.take((id(data), step, "chunk", place))
            yield chunk

    def sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        if self.is_new(task.role, version) and task.role in self.generating:
            self.mail.put((task.role, version, "weights"))
            with self.waiting(task.ranks):
                self.mail.take((task.role, version, "filled"))
        yield from ()

    def trained(self, version: int) -> None:
        if self.versions.is_used(version) or (self.evaluation and self.evaluation.due(version)):
            for role in self.sending:
                if self.synced.get(role) != version:
                    self.mail.put((role, version, "weights"), self.roles[role].copy_weights())

    def end_step(self, data: Coordinator, step: int, metrics: StepMetrics) -> None:
        """Does nothing: the thread does it when it has done all of the step."""

    def after_chain(self, step: int, metrics: StepMetrics) -> None:
        """Hands the metrics of a step to the thread once they are complete: ranks ahead wait for all of them."""
        if not self._evaluates(step):
            self.mail.put((step, "metrics"), (metrics, self.thread.stop_requested()))

    def reduce(self, reducer: MetricsReducer, step: int, metrics: StepMetrics, vote: bool) -> Communication[bool]:
        if self._evaluates(step):
            self.mail.put((step, "metrics"), (metrics, vote))
        with self.waiting(self.all_ranks):
            stop: bool = self.mail.take((step, "vote"))
        yield from ()
        return stop

    def _evaluates(self, step: int) -> bool:
        """Returns whether this worker has a part in the evaluation after a step."""
        return bool(self.evaluation and self.evaluation.due(step) and self.evaluation.worker.chain)

    # What the thread does.

    def _communicate(self) -> Communication[None]:
        """Goes through all steps in the order of `Worker.steps`, but for where a step begins."""
        for step in self.versions.begins:
            if not self._begins_early(step):
                yield from self._begin(step)
            if step <= self.versions.last:
                yield from self._tasks(self.worker, step)

    def _begins_early(self, step: int) -> bool:
        """Returns whether a step begins before the one before it is over, which no evaluation may follow."""
        ended, versions = self.versions.ended_before(step), self.versions
        due = self.evaluation is not None and ended is not None and self.evaluation.due(ended)
        return self._early is not None and versions.first + 1 < step <= versions.last + 1 and not due

    def _begin(self, step: int) -> Communication[None]:
        """Ends the step whose weights a step generates with, and syncs them."""
        ended = self.versions.ended_before(step)
        if ended is not None:
            if self.evaluation and self.evaluation.due(ended):
                yield from self._tasks(self.evaluation.worker, ended)
            metrics, vote = self.mail.take((ended, "metrics"))  # the chains are done with the step
            if self.evaluation:
                self.evaluation.worker.data.end_step(ended)
            metrics.traffic(self.worker.data.end_step(ended))
            stop = yield from super().reduce(self.reducer, ended, metrics, vote)
            self.mail.put((ended, "vote"), stop)
            self.thread.sent.clear()  # of no task
        stops = ended is not None and ended == self.versions.stop_step
        if self._early is not None and step <= self.versions.last and not stops:
            for task in (t for t in self.worker.chain if isinstance(t, SyncWeights)):
                yield from self._task(self.worker, step, task)

    def _tasks(self, worker: Worker, step: int) -> Communication[None]:
        early = self._early if worker is self.worker else None
        sampled, resample, rest = split_at_resample(worker.chain)
        if resample:
            yield from self._rounds(worker, step, sampled, resample)
        for place, task in enumerate(rest, len(worker.chain) - len(rest)):
            if place == early and self._begins_early(step + 1):
                yield from self._begin(step + 1)
            if chunk_of(task) is None and not (early is not None and isinstance(task, SyncWeights)):
                yield from self._task(worker, step, task)
            if isinstance(task, Split):
                yield from self._chunks(worker, step, task)
        if early == len(worker.chain) and self._begins_early(step + 1):
            yield from self._begin(step + 1)

    def _rounds(self, worker: Worker, step: int, sampled: tuple[Task, ...], resample: Resample) -> Communication[None]:
        """Does what the rounds of dynamic sampling need, as many as fill the step."""
        data, full, number = worker.data, False, 0
        data.begin_sampling(step, resample)
        while not full:
            for task in sampled:
                if self._early is None or not isinstance(task, SyncWeights):
                    yield from self._task(worker, step, task)
            key = (id(data), step, "round", number)
            if self._samples:
                self.mail.take((*key, "sampled"))
            full = yield from data.resample(step, resample)
            self.thread.sent.clear()  # of no move
            self.mail.put((*key, "full"), full)
            number += 1

    def _chunks(self, worker: Worker, step: int, split: Split) -> Communication[None]:
        """Does the tasks of all chunks, in an order on which its ranks agree: as they become complete.

        In the r-th round every rank says which of its chunks are complete, once r of them are; chunks that are
        complete everywhere are next. So there are at most as many rounds as chunks, of a few bytes in O(log N)
        messages.
        """
        data, count, complete = worker.data, len(split.parts), list[int]()
        generates, order = split.partition.layout.replica_of(data.rank) is not None, list[int]()
        for r in range(count):
            mask = torch.ones(count, dtype=torch.uint8)
            if generates:
                while len(complete) < count and (
                    len(complete) <= r or self.mail.has((id(data), step, "complete", len(complete)))
                ):
                    complete.append(self.mail.take((id(data), step, "complete", len(complete))))
                mask[:] = 0
                mask[complete] = 1
            agreed = yield from all_reduce(data.rank, split.ranks, mask, torch.minimum)
            for chunk in (i for i in agreed.nonzero().flatten().tolist() if i not in order):
                if data.rank in split.readers:
                    self.mail.put((id(data), step, "chunk", len(order)), chunk)
                order.append(chunk)
                for task in worker.chunk_tasks[chunk]:
                    yield from self._task(worker, step, task)
            if len(order) == count:
                return

    def _task(self, worker: Worker, step: int, task: Task) -> Communication[None]:
        if isinstance(task, Move):
            yield from self._move(worker.data, step, task)
        elif isinstance(task, SyncWeights):
            yield from self._sync_weights(task, worker.version(step))
        worker.recorder.sent_by_thread(step, task, worker.plan, self.thread.sent)

    def _move(self, data: Coordinator, step: int, task: Move) -> Communication[None]:
        key = (id(data), step, task.id)
        sends, receives = (p.layout.replica_of(data.rank) is not None for p in (task.src, task.dst))
        columns = self.mail.take((*key, "sent")) if sends else None
        received = yield from data.exchange(step, task, columns)
        if receives:
            self.mail.put((*key, "received"), received)

    def _sync_weights(self, task: SyncWeights, version: int) -> Communication[None]:
        old, self._synced_by_thread[task.role] = self._synced_by_thread.get(task.role), version
        if old == version:
            return
        weights = self.mail.take((task.role, version, "weights"))
        yield from self.roles[task.role].sync_weights(version, weights)
        finish(self.thread.device)  # before the memory of this copy is the chain's again, which does not wait for us
        if task.role in self.generating:
            self.mail.put((task.role, version, "filled"))
