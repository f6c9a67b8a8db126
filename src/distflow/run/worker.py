"""One worker: runs its chain of tasks, step by step."""

import functools
import inspect
import logging
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import NO_SAMPLES, Batch, Column, Ragged
from distflow.batch.context import Context
from distflow.comm.collectives import Communication, SendReceive
from distflow.comm.transport import is_peer_lost, short_message
from distflow.coordinator.coordinator import Coordinator, by_field
from distflow.errors import DistflowError, NodeError, PeerLostError
from distflow.flow.graph import SOURCE, Node
from distflow.observe.metrics import StepMetrics
from distflow.observe.recorder import NO_RECORDER, Recorder
from distflow.plan.field_bytes import SCORE
from distflow.plan.layout import format_ranks
from distflow.plan.tasks import Free, Load, Merge, Move, Resample, RunNode, Split, SyncWeights, Task, chunk_of
from distflow.run.chunk_sender import ChunkSender
from distflow.run.comm import Comm
from distflow.run.rollouts import PartialRollouts, Rollout, Rollouts

logger = logging.getLogger(__name__)
TOKENS = "response_tokens"


@dataclass(frozen=True)
class Surroundings:
    """The settings that the training and the evaluating worker of a rank share."""

    seed: int = 0
    folder: Path = Path()  # of the run
    on_task: Callable[[int, str], None] = lambda step, name: None  # is called before each task
    recorder: Recorder = NO_RECORDER


class Worker:
    """Runs the tasks of one rank. The methods of `comm.roles` are the nodes of roles.

    `held_out`: the plan is an evaluation. `rollouts` keeps rollouts that are ahead of training.
    """

    def __init__(
        self,
        data: Coordinator,
        comm: Comm,
        around: Surroundings = Surroundings(),
        held_out: bool = False,
        rollouts: Rollouts | None = None,
    ) -> None:
        self.rank, self.plan, self.data, self.comm = data.rank, data.plan, data, comm
        self.around, self.recorder = around, around.recorder.held_out() if held_out else around.recorder
        self.held_out, self.rollouts = held_out, rollouts if data.plan.staleness else None
        self.chain = self.plan.chain(self.rank)
        self.split = next((t for t in self.chain if isinstance(t, Split)), None)
        self.chunk_tasks: dict[int, list[Task]] = {}  # of the chain, by chunk
        for t in self.chain:
            if (chunk := chunk_of(t)) is not None:
                self.chunk_tasks.setdefault(chunk, []).append(t)
        # Whether all ranks run the same nodes, so that the slowest of them is slow.
        self.ranks_alike = len({self.plan.partition_of(n.id).layout.ranks for n in self.plan.flow.nodes}) == 1
        self.work_s = 0.0  # time in nodes in this step; all other time may be spent waiting for others
        self.functions = {
            t.node: _bind(self.plan.flow.node(t.node), comm.roles) for t in self.chain if isinstance(t, RunNode)
        }

    def steps(
        self,
        end_of_step: Callable[[int, StepMetrics], None],
        after_step: Callable[[int, StepMetrics], Iterable[SendReceive]] = lambda step, metrics: (),
        after_chain: Callable[[int, StepMetrics], None] = lambda step, metrics: None,
    ) -> Communication[None]:
        """Runs all steps of the run; yields the messages they need.

        `after_chain` is called when this worker has done its part of a step. A step ends (`after_step`, `end_of_step`)
        once all have, when the ranks ahead reach it: just before the step that generates with its weights.
        """
        running: dict[int, StepMetrics] = {}
        versions = self.comm.versions
        self.comm.trained(versions.first)
        for step in versions.begins:
            ended = versions.ended_before(step)
            if ended is not None:
                metrics = running.pop(ended)
                self.comm.end_step(self.data, ended, metrics)
                yield from after_step(ended, metrics)
                end_of_step(ended, metrics)
            if step <= versions.last:
                metrics = running[step] = StepMetrics()
                start, cpu_start = time.perf_counter(), time.process_time()
                yield from self.run_chain(step, metrics)
                self.data.check_freed(step)
                metrics.time("step", time.perf_counter() - start)
                metrics.log("perf/cpu_s", time.process_time() - cpu_start, reduce="sum")
                metrics.log("perf/peak_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, reduce="max")
                self.comm.trained(step)
                after_chain(step, metrics)

    def version(self, step: int) -> int:
        """Returns the version of the weights that the chain generates with."""
        return step if self.held_out else self.comm.versions.of(step)

    def run_chain(self, step: int, metrics: StepMetrics) -> Communication[None]:
        """Runs the chain once."""
        times: dict[str, float] = {}
        self.work_s = 0.0
        sampled, resample, rest = split_at_resample(self.chain)
        if resample:
            self.data.begin_sampling(step, resample)
            full, number = False, 0
            while not full:
                yield from self._run_tasks(sampled, step, metrics, times)
                self.around.on_task(step, resample.name)
                with self.recorder.task(step, resample, self.plan):
                    full = yield from self.comm.resample(self.data, step, resample, number)
                number += 1
            metrics.sampling(self.data.sampled_prompts(step))
        yield from self._run_tasks(rest, step, metrics, times)
        for name, seconds in times.items():
            metrics.time(name, seconds)
        metrics.work(self.rank, self.work_s, self.ranks_alike)

    def _run_tasks(
        self, tasks: Iterable[Task], step: int, metrics: StepMetrics, times: dict[str, float]
    ) -> Communication[None]:
        by_chunk: dict[int, StepMetrics] = {}
        for task in self._in_order(tasks, step):
            start, chunk = time.perf_counter(), chunk_of(task)
            self.around.on_task(step, task.name)
            logger.debug("rank %d, step %d: %s", self.rank, step, task.name)
            with self.recorder.task(step, task, self.plan) as details:
                match task:
                    case Load():
                        self.data.load(step, task)
                    case Move():
                        yield from self.comm.move(self.data, step, task)
                    case SyncWeights():
                        yield from self.comm.sync_weights(task, self.version(step))
                    case RunNode():
                        logged = metrics if chunk is None else by_chunk.setdefault(chunk, StepMetrics())
                        details.update(self.run_node(step, task, logged))
                        self.work_s += time.perf_counter() - start
                    case Merge():
                        self.data.merge(step, task)
                    case Split():
                        pass  # the node before has sent all chunks
                    case Free():
                        self.data.free(step, task)
            if not isinstance(task, Free | Split):
                name = "move" if isinstance(task, Move) else task.name.replace(" ", "_")
                times[name] = times.get(name, 0.0) + time.perf_counter() - start
        for chunk in sorted(by_chunk):  # sums do not depend on the order in which chunks were complete
            metrics.merge(by_chunk[chunk].totals)

    def _in_order(self, tasks: Iterable[Task], step: int) -> Iterator[Task]:
        """Yields tasks in their order, and those of chunks in the order in which these were sent."""
        for task in tasks:
            if chunk_of(task) is None:
                yield task
            if isinstance(task, Split):
                for chunk in self.comm.chunk_order(self.data, step, task):
                    yield from self.chunk_tasks.get(chunk, ())

    def run_node(self, step: int, task: RunNode, metrics: StepMetrics) -> dict[str, int]:
        """Calls the node's function; returns how many samples, and tokens of responses, it was given."""
        node, fn = self.plan.flow.node(task.node), self.functions[task.node]
        batch = self.data.inputs(step, task)
        if not len(batch) and not node.method:  # a method is called: models of several workers compute together
            self.data.outputs(step, task, dict.fromkeys(node.writes, NO_SAMPLES))
            return {"samples": 0}
        versions = {f: _version(c) for f, c in batch.columns.items()}
        metrics = metrics.with_prefix(node.prefix) if node.prefix else metrics
        layout, groups = task.partition.layout, self.data.groups(step)
        context = Context(
            step, self.rank, self.plan.workers, layout, self.around.seed, metrics, self.around.folder, groups
        )
        if not context.is_dp_leader:  # the ranks of a replica have the same samples, of which a sum counts each once
            context = replace(context, metrics=metrics.without_sums())
        record = self.recorder.node(context, self.plan.repeat)
        context = replace(context, record=record, steps=self.comm.versions.last, held_out=self.held_out)
        if node.generates:
            context = replace(context, upcoming=self._upcoming(context, node, task))
        chunks = None
        if self.split and node.generates:
            send = partial(self.comm.send_chunk, self.data, step)
            chunks = ChunkSender(self.data, step, self.split, len(batch), send)
            context = replace(context, chunks=chunks)
        try:
            if self.rollouts and node.generates:
                result = self._generate(context, node, task, batch, metrics)
            else:
                result = fn(batch, context)
            _check_unchanged(node, batch, versions)
            self.data.outputs(step, task, result)
            if chunks:
                chunks.send_rest(by_field(result, node.writes))
            self._note_scores(context, node, batch, result)
            self.recorder.outputs(context.record, self.plan.flow.source, node.writes, batch, result)
        except Exception as e:
            where = f"rank {self.rank}, step {step}, node '{node.id}'"
            if is_peer_lost(e):
                raise PeerLostError(f"{where}: lost one of ranks {format_ranks(task.ranks)}: {short_message(e)}") from e
            message = str(e) if isinstance(e, DistflowError) else f"{type(e).__name__}: {e}"
            raise NodeError(f"{where}: {message}") from e
        return {"samples": len(batch), **({"tokens": int(batch[TOKENS].lengths.sum())} if TOKENS in batch else {})}

    def _note_scores(self, context: Context, node: Node, batch: Batch, result: Any) -> None:
        """Tells the curriculum how the samples of this worker did."""
        curriculum = self.comm.curriculum
        if not curriculum or SCORE not in node.writes or self.held_out or not context.is_dp_leader:
            return
        scores = torch.as_tensor(by_field(result, node.writes)[SCORE]).tolist()
        places = batch.ids // self.plan.repeat - self.data.loader.position(context.step - 1)
        for place, score in zip(places.tolist(), scores, strict=True):
            curriculum.note(context.step - 1, place, score)

    def _generate(
        self, context: Context, node: Node, task: RunNode, batch: Batch, metrics: StepMetrics
    ) -> Mapping[str, Any]:
        """Calls a node that generates, or recalls its rollout in a resumed run; keeps rollouts ahead of training."""
        assert self.rollouts
        rollout = self.rollouts.recall(context.step, node, context.layout, self.rank, batch.ids)
        if rollout is None:
            own = StepMetrics()
            context = replace(context, metrics=own.with_prefix(node.prefix) if node.prefix else own)
            if self.plan.prompts_ahead:
                ahead = self._ahead(context, node, task, self.data.share_ahead(task))
                begun = self.rollouts.begun(context.step, context.layout, self.rank)
                context = replace(context, partial=PartialRollouts(ahead, begun))
            result = by_field(self.functions[node.id](batch, context), node.writes)
            if isinstance(context.partial, PartialRollouts):
                self.rollouts.carry(context.step, context.partial.carried)
            rollout = Rollout(batch.ids, result, own)
        elif len(missing := np.flatnonzero(~np.isin(batch.ids, rollout.ids))):
            # Another layout draws other rounds. What its rounds have beyond those of before cannot be selected.
            result = by_field(self.functions[node.id](batch.select(missing), context), node.writes)
            rollout = rollout.joined(Rollout(batch.ids[missing], result, StepMetrics()))
        self.rollouts.keep(context.step, node, rollout)
        metrics.merge(rollout.metrics.totals)
        return rollout.columns

    def _ahead(self, context: Context, node: Node, task: RunNode, prompts: int, last: int | None = None) -> Batch:
        ahead = self.data.ahead(context.step, task, context.steps if last is None else last, prompts)
        ahead.columns = {node.local_name(f): c for f, c in ahead.columns.items()}
        return ahead

    def _upcoming(self, context: Context, node: Node, task: RunNode) -> Callable[[int], Batch] | None:
        """Returns what gives a node samples of the next step, if it reads rows as they are loaded on these ranks."""
        flow, layout = self.plan.flow, task.partition.layout
        loads = all(flow.writer[f] == SOURCE for f in node.reads) and layout == self.plan.partition_of(SOURCE).layout
        if self.held_out or flow.sampling_node or not loads:
            return None
        last = min(context.step + 1, context.steps)
        return lambda samples: self._ahead(context, node, task, -(-samples // self.plan.repeat), last)


def split_at_resample(chain: tuple[Task, ...]) -> tuple[tuple[Task, ...], Resample | None, tuple[Task, ...]]:
    """Splits off the tasks of dynamic sampling, which are repeated until the step is full."""
    for i, task in enumerate(chain):
        if isinstance(task, Resample):
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
