"""One worker: walks its chain of tasks, step after step."""

import functools
import inspect
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.coordinator import Coordinator
from distflow.data.exchange import Collective
from distflow.errors import DistflowError, NodeError
from distflow.flow.graph import Node
from distflow.observe.metrics import Tally
from distflow.plan.layout import Layout
from distflow.plan.tasks import Free, Load, Move, Plan, Run


@dataclass(frozen=True)
class Context:
    """What a node may ask for, by a parameter called `ctx`."""

    step: int
    rank: int
    workers: int
    layout: Layout
    seed: int
    metrics: Tally


class Worker:
    """`players`: role → the object whose methods are its nodes. `doing` is told what the worker is about to do."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        data: Coordinator,
        players: Mapping[str, Any],
        seed: int,
        doing: Callable[[int, str], None],
        end_of_step: Callable[[int, Tally], None],
    ) -> None:
        self.rank, self.plan, self.data, self.seed = rank, plan, data, seed
        self.doing, self.end_of_step = doing, end_of_step
        self.chain = plan.chain(rank)
        self.functions = {t.node: _bind(plan.flow.node(t.node), players) for t in self.chain if isinstance(t, Run)}

    def steps(self, first: int, last: int) -> Generator[Collective, Tensor, None]:
        """Steps first … last − 1; yields the collectives they need."""
        for step in range(first, last):
            tally = Tally()
            began = time.perf_counter()
            for task in self.chain:
                start = time.perf_counter()
                self.doing(step, task.name)
                match task:
                    case Load():
                        self.data.load(step, task)
                    case Move():
                        yield from self.data.move(step, task)
                    case Run():
                        self.run_node(step, task, tally)
                    case Free():
                        self.data.free(step, task)
                if not isinstance(task, Free):
                    tally.time("move" if isinstance(task, Move) else task.name, time.perf_counter() - start)
            tally.time("step", time.perf_counter() - began)
            tally.traffic(self.data.end(step))
            self.end_of_step(step, tally)

    def run_node(self, step: int, task: Run, tally: Tally) -> None:
        node, fn = self.plan.flow.node(task.node), self.functions[task.node]
        batch = self.data.inputs(step, task)
        before = {f: _version(c) for f, c in batch.columns.items()}
        context = Context(step, self.rank, self.plan.workers, task.partition.layout, self.seed, tally)
        try:
            result = fn(batch, context)
            _check_unchanged(node, batch, before)
            self.data.outputs(step, task, result)
        except Exception as e:
            what = str(e) if isinstance(e, DistflowError) else f"{type(e).__name__}: {e}"
            raise NodeError(f"rank {self.rank}, step {step}, node '{node.id}': {what}") from e


def _bind(node: Node, players: Mapping[str, Any]) -> Callable[[Batch, Context], Any]:
    """The node's function as called here: with its object, its constants, and the context if it asks for it."""
    assert node.fn is not None
    fn = functools.partial(node.fn, players[node.role]) if node.method else node.fn
    wants_context = "ctx" in inspect.signature(node.fn).parameters

    def call(batch: Batch, context: Context) -> Any:
        extra = {"ctx": context} if wants_context else {}
        return fn(batch, **node.params, **extra)

    return call


def _version(column: Column) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return values._version if isinstance(values, Tensor) and not values.is_inference() else 0


def _check_unchanged(node: Node, batch: Batch, before: Mapping[str, int]) -> None:
    """Other readers see the same memory: who wrote into it would change what they read."""
    for f, version in before.items():
        if f in batch and _version(batch[f]) != version:
            raise NodeError(f"changed field '{f}' in place, which other nodes read; change a copy and write that")
