"""One worker: runs its chain of tasks, step by step."""

import functools
import inspect
import logging
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distflow.data.batch import NO_SAMPLES, Batch, Column, Ragged
from distflow.data.collectives import Communication, SendReceive
from distflow.data.context import Context
from distflow.data.coordinator import Coordinator
from distflow.data.transport import is_peer_lost, short_message
from distflow.errors import DistflowError, NodeError, PeerLostError
from distflow.flow.graph import Node
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import format_ranks
from distflow.plan.tasks import Free, Load, Move, Plan, Refill, Run, Task, Weights

logger = logging.getLogger(__name__)


class Worker:
    """`roles`: role → the object whose methods are its nodes. `on_task(step, name)` is called before each task."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        data: Coordinator,
        roles: Mapping[str, Any],
        seed: int,
        folder: Path,
        on_task: Callable[[int, str], None],
    ) -> None:
        self.rank, self.plan, self.data, self.seed, self.folder = rank, plan, data, seed, folder
        self.roles, self.on_task = roles, on_task
        self.chain = plan.chain(rank)
        self.work_s = 0.0  # time in nodes in this step; all other time may be spent waiting for others
        self.functions = {t.node: _bind(plan.flow.node(t.node), roles) for t in self.chain if isinstance(t, Run)}

    def steps(
        self,
        first: int,
        last: int,
        end_of_step: Callable[[int, StepMetrics], None],
        after_step: Callable[[int, StepMetrics], Iterable[SendReceive]] = lambda step, metrics: (),
    ) -> Communication[None]:
        """Runs the steps first … last − 1; yields the messages they need."""
        for step in range(first, last):
            metrics = StepMetrics()
            start, cpu_start = time.perf_counter(), time.process_time()
            yield from self.run_chain(step, metrics)
            metrics.time("step", time.perf_counter() - start)
            metrics.log("perf/cpu_s", time.process_time() - cpu_start, reduce="sum")
            metrics.log("perf/peak_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, reduce="max")
            metrics.traffic(self.data.end_step(step))
            yield from after_step(step, metrics)
            end_of_step(step, metrics)

    def run_chain(self, step: int, metrics: StepMetrics, run_step: int | None = None) -> Communication[None]:
        """Runs the chain once on the samples of `step`; `run_step` is the step of the run, if that differs."""
        run_step = step if run_step is None else run_step
        times: dict[str, float] = {}
        self.work_s = 0.0
        sampled, refill, rest = _split_at_refill(self.chain)
        if refill:
            self.data.begin_sampling(refill)
            full = False
            while not full:
                yield from self._run_tasks(sampled, step, run_step, metrics, times)
                self.on_task(run_step, refill.name)
                full = yield from self.data.refill(step, refill)
            metrics.sampling(self.data.sampled_prompts)
        yield from self._run_tasks(rest, step, run_step, metrics, times)
        for name, seconds in times.items():
            metrics.time(name, seconds)
        metrics.work(self.rank, self.work_s)

    def _run_tasks(
        self, tasks: Iterable[Task], step: int, run_step: int, metrics: StepMetrics, times: dict[str, float]
    ) -> Communication[None]:
        for task in tasks:
            start = time.perf_counter()
            self.on_task(run_step, task.name)
            logger.debug("rank %d, step %d: %s", self.rank, run_step, task.name)
            match task:
                case Load():
                    self.data.load(step, task)
                case Move():
                    yield from self.data.move(step, task)
                case Weights():
                    yield from self.roles[task.role].hand_over()
                case Run():
                    self.run_node(step, run_step, task, metrics)
                    self.work_s += time.perf_counter() - start
                case Free():
                    self.data.free(step, task)
            if not isinstance(task, Free):
                name = "move" if isinstance(task, Move) else task.name.replace(" ", "_")
                times[name] = times.get(name, 0.0) + time.perf_counter() - start

    def run_node(self, step: int, run_step: int, task: Run, metrics: StepMetrics) -> None:
        node, fn = self.plan.flow.node(task.node), self.functions[task.node]
        batch = self.data.inputs(step, task)
        if not len(batch) and not node.method:  # a method is called: models of several workers compute together
            self.data.outputs(step, task, dict.fromkeys(node.writes, NO_SAMPLES))
            return
        versions = {f: _version(c) for f, c in batch.columns.items()}
        metrics = metrics.with_prefix(node.prefix) if node.prefix else metrics
        layout, groups = task.partition.layout, self.data.groups(step)
        context = Context(run_step, self.rank, self.plan.workers, layout, self.seed, metrics, self.folder, groups)
        try:
            result = fn(batch, context)
            _check_unchanged(node, batch, versions)
            self.data.outputs(step, task, result)
        except Exception as e:
            where = f"rank {self.rank}, step {run_step}, node '{node.id}'"
            if is_peer_lost(e):
                raise PeerLostError(f"{where}: lost one of ranks {format_ranks(task.ranks)}: {short_message(e)}") from e
            message = str(e) if isinstance(e, DistflowError) else f"{type(e).__name__}: {e}"
            raise NodeError(f"{where}: {message}") from e


def _split_at_refill(chain: tuple[Task, ...]) -> tuple[tuple[Task, ...], Refill | None, tuple[Task, ...]]:
    """Splits off the tasks of dynamic sampling, which are repeated until the step is full."""
    for i, task in enumerate(chain):
        if isinstance(task, Refill):
            return chain[:i], task, chain[i + 1 :]
    return (), None, chain


def _bind(node: Node, roles: Mapping[str, Any]) -> Callable[[Batch, Context], Any]:
    """Returns the node's function bound to its object, its constants, and the context if it asks for one."""
    assert node.fn is not None
    fn = functools.partial(node.fn, roles[node.role]) if node.method else node.fn
    wants_context = "ctx" in inspect.signature(node.fn).parameters

    def call(batch: Batch, context: Context) -> Any:
        extra = {"ctx": context} if wants_context else {}
        if not node.prefix:
            return fn(batch, **node.params, **extra)
        renamed = Batch(batch.ids, batch.groups, {node.local_name(f): c for f, c in batch.columns.items()})
        result = fn(renamed, **node.params, **extra)
        result = result.columns if isinstance(result, Batch) else result
        return {node.prefix + f: c for f, c in result.items()} if isinstance(result, Mapping) else result

    return call


def _version(column: Column) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return values._version if isinstance(values, Tensor) and not values.is_inference() else 0


def _check_unchanged(node: Node, batch: Batch, versions: Mapping[str, int]) -> None:
    """Refuses a node that wrote into its inputs: other readers see the same memory."""
    for f, version in versions.items():
        if f in batch and _version(batch[f]) != version:
            raise NodeError(f"changed field '{f}' in place, which other nodes read; change a copy and write that")
