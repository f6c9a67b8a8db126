"""One worker: walks its chain of tasks, step after step."""

import functools
import inspect
import resource
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.context import Context
from distflow.data.coordinator import Coordinator
from distflow.data.exchange import Collective
from distflow.data.transport import lost, reason
from distflow.errors import DistflowError, NodeError, PeerLostError
from distflow.flow.graph import Node
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import format_ranks
from distflow.plan.tasks import Free, Load, Move, Plan, Refill, Run, Task, Weights


class Worker:
    """`roles`: role → the object whose methods are its nodes. `doing` is told what the worker is about to do."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        data: Coordinator,
        roles: Mapping[str, Any],
        seed: int,
        folder: Path,
        doing: Callable[[int, str], None],
    ) -> None:
        self.rank, self.plan, self.data, self.seed, self.folder = rank, plan, data, seed, folder
        self.roles, self.doing = roles, doing
        self.chain = plan.chain(rank)
        self.worked = 0.0  # seconds in nodes, of this step: all else may be waiting for others
        self.functions = {t.node: _bind(plan.flow.node(t.node), roles) for t in self.chain if isinstance(t, Run)}

    def steps(
        self,
        first: int,
        last: int,
        end_of_step: Callable[[int, StepMetrics], None],
        after_step: Callable[[int, StepMetrics], Iterator[Collective]] = lambda step, metrics: iter(()),
    ) -> Generator[Collective, Tensor, None]:
        """Steps first … last − 1; yields the collectives they need."""
        for step in range(first, last):
            metrics = StepMetrics()
            began, worked = time.perf_counter(), time.process_time()
            yield from self.walk(step, metrics)
            metrics.time("step", time.perf_counter() - began)
            metrics.log("perf/cpu_s", time.process_time() - worked, reduce="sum")
            metrics.log("perf/peak_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, reduce="max")
            metrics.traffic(self.data.end(step))
            yield from after_step(step, metrics)
            end_of_step(step, metrics)

    def walk(self, step: int, metrics: StepMetrics, now: int | None = None) -> Generator[Collective, Tensor, None]:
        """The chain once, on the samples of `step`; `now` is the step of the run, where that is another."""
        now = step if now is None else now
        took: dict[str, float] = {}
        self.worked = 0.0
        first, refill, rest = _sections(self.chain)
        if refill:
            self.data.begin(refill)
            full = False
            while not full:
                yield from self._do(first, step, now, metrics, took)
                self.doing(now, refill.name)
                full = yield from self.data.refill(step, refill)
            metrics.sampling(self.data.drawn)
        yield from self._do(rest, step, now, metrics, took)
        for name, seconds in took.items():
            metrics.time(name, seconds)
        metrics.work(self.rank, self.worked)

    def _do(
        self, tasks: Iterable[Task], step: int, now: int, metrics: StepMetrics, took: dict[str, float]
    ) -> Generator[Collective, Tensor, None]:
        for task in tasks:
            start = time.perf_counter()
            self.doing(now, task.name)
            match task:
                case Load():
                    self.data.load(step, task)
                case Move():
                    yield from self.data.move(step, task)
                case Weights():
                    yield from self.roles[task.role].hand_over()
                case Run():
                    self.run_node(step, now, task, metrics)
                    self.worked += time.perf_counter() - start
                case Free():
                    self.data.free(step, task)
            if not isinstance(task, Free):
                name = "move" if isinstance(task, Move) else task.name.replace(" ", "_")
                took[name] = took.get(name, 0.0) + time.perf_counter() - start

    def run_node(self, step: int, now: int, task: Run, metrics: StepMetrics) -> None:
        node, fn = self.plan.flow.node(task.node), self.functions[task.node]
        batch = self.data.inputs(step, task)
        before = {f: _version(c) for f, c in batch.columns.items()}
        metrics = metrics.under(node.prefix) if node.prefix else metrics
        layout, groups = task.partition.layout, self.data.groups(step)
        context = Context(now, self.rank, self.plan.workers, layout, self.seed, metrics, self.folder, groups)
        try:
            result = fn(batch, context)
            _check_unchanged(node, batch, before)
            self.data.outputs(step, task, result)
        except Exception as e:
            where = f"rank {self.rank}, step {now}, node '{node.id}'"
            if lost(e):
                raise PeerLostError(f"{where}: lost one of ranks {format_ranks(task.ranks)}: {reason(e)}") from e
            what = str(e) if isinstance(e, DistflowError) else f"{type(e).__name__}: {e}"
            raise NodeError(f"{where}: {what}") from e


def _sections(chain: tuple[Task, ...]) -> tuple[tuple[Task, ...], Refill | None, tuple[Task, ...]]:
    """What is run again until the step is full, and what comes after it."""
    for i, task in enumerate(chain):
        if isinstance(task, Refill):
            return chain[:i], task, chain[i + 1 :]
    return (), None, chain


def _bind(node: Node, roles: Mapping[str, Any]) -> Callable[[Batch, Context], Any]:
    """The node's function as called here: with its object, its constants, and the context if it asks for it."""
    assert node.fn is not None
    fn = functools.partial(node.fn, roles[node.role]) if node.method else node.fn
    wants_context = "ctx" in inspect.signature(node.fn).parameters

    def call(batch: Batch, context: Context) -> Any:
        extra = {"ctx": context} if wants_context else {}
        if not node.prefix:
            return fn(batch, **node.params, **extra)
        shown = Batch(batch.ids, batch.groups, {node.shown(f): c for f, c in batch.columns.items()})
        result = fn(shown, **node.params, **extra)
        result = result.columns if isinstance(result, Batch) else result
        return {node.prefix + f: c for f, c in result.items()} if isinstance(result, Mapping) else result

    return call


def _version(column: Column) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return values._version if isinstance(values, Tensor) and not values.is_inference() else 0


def _check_unchanged(node: Node, batch: Batch, before: Mapping[str, int]) -> None:
    """Other readers see the same memory: who wrote into it would change what they read."""
    for f, version in before.items():
        if f in batch and _version(batch[f]) != version:
            raise NodeError(f"changed field '{f}' in place, which other nodes read; change a copy and write that")
