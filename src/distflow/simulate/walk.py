"""Walks the tasks of a plan in their global order, with a clock for every worker. Ranks are never looped over."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from distflow.comm.domains import Domains
from distflow.config.model_shape import Floats
from distflow.errors import ConfigError
from distflow.flow.graph import Node
from distflow.plan.layout import Layout
from distflow.plan.tasks import Free, Load, Move, Plan, Resample, RunNode, SyncWeights, Task
from distflow.simulate.compute import Work, compute_times, in_lockstep, shards_of
from distflow.simulate.costs import Costs
from distflow.simulate.hardware import Hardware
from distflow.simulate.memory import memory_of
from distflow.simulate.network import NetworkModel
from distflow.simulate.result import LinkBytes, RankSet, SimulatedStep, TaskSpan, TaskTime, TaskTimes
from distflow.simulate.traffic import contiguous, header_bytes, new_replicas, traffic
from distflow.simulate.weight_sync import sync_weights
from distflow.util.arrays import Ints

_METRICS = 4096  # bytes that are reduced over all workers at the end of a step


class Hosts(Protocol):
    """A topology: the host of every rank."""

    @property
    def hosts(self) -> tuple[int, ...]: ...


def simulate(plan: Plan, hardware: Hardware, costs: Costs, topology: Hosts | None = None) -> SimulatedStep:
    """Simulates one step. By default each host has the hardware's number of consecutive ranks."""
    if topology is not None and len(topology.hosts) != plan.workers:
        raise ConfigError(f"topology: it has {len(topology.hosts)} ranks, and the plan {plan.workers}")
    costs.check(plan)
    if topology is None:
        hosts: Ints = np.arange(plan.workers, dtype=np.int64) // hardware.workers_per_host
    else:
        hosts = np.asarray(topology.hosts, np.int64)
    return _Walk(plan, hardware, costs, hosts).run()


class _Walk:
    """`now[r]` is when rank r is free and starts its next task."""

    def __init__(self, plan: Plan, hardware: Hardware, costs: Costs, hosts: Ints) -> None:
        self.plan, self.hardware, self.costs, self.hosts = plan, hardware, costs, hosts
        self.network = NetworkModel(hardware, hosts)
        self.domains = Domains(plan, plan.samples)
        self.lengths = costs.response_lengths(plan.samples)
        speeds = np.random.default_rng([costs.seed, plan.workers]).standard_normal(plan.workers)
        self.slowness: Floats = np.exp(hardware.device.spread * speeds)
        self.now = np.zeros(plan.workers)
        self.computing, self.communicating = np.zeros(plan.workers), np.zeros(plan.workers)
        self.replica: dict[str, Ints] = {}  # partition → the replica of every sample
        self.times: list[TaskTime] = []
        # Each task: its start and end on each rank, and the time in which the rank is busy.
        self.timeline: list[tuple[Task | None, Floats, Floats, Floats]] = []
        self.recorded: list[TaskTimes] = []
        self.events = 0

    def run(self) -> SimulatedStep:
        for task in self.plan.tasks:
            match task:
                case Load():
                    self.replica[task.partition.id] = contiguous(task.partition, self.plan.samples, self.plan.repeat)
                case Move():
                    self._communicate(task, task.name, "move", self._move)
                case RunNode():
                    self._run(task)
                case SyncWeights():
                    self._communicate(task, task.name, "weights", self._weights)
                case Resample():  # one round is assumed: all samples are kept
                    for src, dst, _ in task.carried:
                        self.replica[dst.id] = self.replica[src.id]
                case Free():
                    continue
            self.events += 1
        self._communicate(None, "metrics and stop vote", "control", self._metrics)
        return self._result()

    def _communicate(
        self, task: Task | None, name: str, kind: str, function: Callable[[Task | None, Floats], tuple[Floats, float]]
    ) -> None:
        """Runs a task that communicates; its own time excludes the wait for the last rank to start."""
        before, crossed = self.now.copy(), self.network.sent.sum()
        end, size = function(task, before)
        ranks = self._ranks(task)
        self.now = end
        # Early ranks wait. The exchange itself takes time only from the start of the last rank.
        own = np.minimum(end[ranks] - before[ranks], np.maximum(end[ranks] - before[ranks].max(), 0.0))
        self.communicating[ranks] += own
        network = float(self.network.sent.sum() - crossed)
        self._record(task, name, kind, ranks, before, end, float(own.max()), own, size, network)

    def _ranks(self, task: Task | None) -> Ints:
        return np.arange(self.plan.workers) if task is None else np.asarray(task.ranks, np.int64)

    def _move(self, task: Task | None, start: Floats) -> tuple[Floats, float]:
        assert isinstance(task, Move)
        plan, ranks = self.plan, self._ranks(task)
        size = self.costs.sample_bytes(plan, task.fields, self.lengths)
        old, domains = self.replica[task.src.id], self.domains.all(task)
        if task.assigns:
            weights = self.lengths if task.dst.balance else size
            self.replica[task.dst.id] = new_replicas(domains, old, weights, plan.repeat)
        elif task.dst.id not in self.replica:
            self.replica[task.dst.id] = contiguous(task.dst, plan.samples, plan.repeat)
        flows = traffic(task, old, self.replica[task.dst.id], size, plan.workers)
        if all(d.known for d in domains):  # only sizes are told
            now = self.network.exchange(flows.sender, flows.receiver, np.full(len(flows.sender), 8.0), start)
        else:
            header = header_bytes(domains[0].move, domains[0].samples, plan.repeat)
            now = self.network.all_gather_by_host(np.array([d.move.ranks for d in domains]), header, start)
        routing = domains[0].samples * self.hardware.cpu.sample_s
        now = now.copy()
        now[ranks] += routing + flows.kept[ranks] / self.hardware.cpu.pack_rate
        self.network.cpu_s[ranks] += routing
        end = self.network.exchange(flows.sender, flows.receiver, flows.wire, now, pack=True)
        return end, float(flows.payload.sum())

    def _weights(self, task: Task | None, start: Floats) -> tuple[Floats, float]:
        assert isinstance(task, SyncWeights)
        source, target = self._trained(task.role), self._generates(task.role)
        size = self.costs.weights(task.role)
        if source is None or target is None or not size:
            return start, 0.0
        return sync_weights(self.network, source.without_sp, target, shards_of(source, self.costs), size, start)

    def _metrics(self, task: Task | None, start: Floats) -> tuple[Floats, float]:
        return self.network.all_reduce(self._ranks(task), _METRICS, start), 0.0

    def _trained(self, role: str) -> Layout | None:
        return self._layout(lambda n: n.role == role and n.type == "train")

    def _generates(self, role: str) -> Layout | None:
        return self._layout(lambda n: n.role == role and n.generates)

    def _layout(self, wanted: Callable[[Node], bool]) -> Layout | None:
        return next((self.plan.partition_of(n.id).layout for n in self.plan.flow.order if wanted(n)), None)

    def _run(self, task: RunNode) -> None:
        layout = task.partition.layout
        if task.partition.id not in self.replica:  # a node that reads nothing has contiguous shares
            self.replica[task.partition.id] = contiguous(task.partition, self.plan.samples, self.plan.repeat)
        node = self.plan.flow.node(task.node)
        ranks = np.asarray(layout.ranks, np.int64)
        slowness = self.slowness[ranks].reshape(layout.dp, layout.replica_size).max(axis=1)
        replica = self.replica[task.partition.id]
        work = Work(node, layout, replica, self.lengths, self.hosts, self.plan.repeat, slowness)
        times = compute_times(work, self.hardware, self.costs)
        before = self.now.copy()
        start = self.now[ranks].reshape(layout.dp, layout.replica_size).max(axis=1)
        if in_lockstep(work, self.costs):
            end = np.full(layout.dp, start.max() + float(times.elapsed.max()))
        else:
            end = start + times.elapsed
        self.now = self.now.copy()
        self.now[ranks] = np.repeat(end, layout.replica_size)
        busy = np.repeat(times.busy, layout.replica_size)
        self.computing[ranks] += busy
        elapsed = float(times.elapsed.max())
        self._record(task, task.name, "run", ranks, before, self.now, elapsed, busy, 0.0, 0.0)

    def _record(
        self,
        task: Task | None,
        name: str,
        kind: str,
        ranks: Ints,
        before: Floats,
        end: Floats,
        elapsed: float,
        busy: Floats,
        size: float,
        network: float,
    ) -> None:
        own = np.zeros(self.plan.workers)
        own[ranks] = busy
        begin = np.minimum(np.maximum(before, before[ranks].max()), end) if kind != "run" else before
        self.timeline.append((task, begin, end, own))
        self.recorded.append(TaskTimes(task, ranks, before[ranks], end[ranks], busy))
        self.times.append(
            TaskTime(
                name,
                kind,
                float(before[ranks].min()),
                float(end[ranks].max()),
                elapsed,
                float(busy.mean()),
                size,
                network,
            )
        )

    def _result(self) -> SimulatedStep:
        step = float(self.now.max())
        network = self.network
        through = np.maximum(network.sent, network.received)
        if self.hardware.network.per == "host":
            through = np.maximum(np.bincount(self.hosts, network.sent), np.bincount(self.hosts, network.received))
        links = LinkBytes(float(through.max()), float(through.mean()), self.hardware.network.per)
        return SimulatedStep(
            step_s=step,
            tasks=tuple(self.times),
            rank_sets=tuple(self._rank_set(ranks, step) for ranks in self.plan.chains()),
            links=links,
            local_bytes=float(network.sent_locally.sum()),
            messages=float(network.messages.max()),
            control_cpu_s=float(network.cpu_s.max()),
            all_cpu_s=float(network.cpu_s.sum()),
            tokens=float(self.lengths.sum()),
            workers=self.plan.workers,
            events=self.events + network.events,
            notes=self._notes(),
            samples=self.plan.samples,
            sent=network.sent,
            recorded=tuple(self.recorded),
        )

    def _rank_set(self, ranks: tuple[int, ...], step: float) -> RankSet:
        index = np.asarray(ranks, np.int64)
        spans = []
        for (task, begin, end, own), time in zip(self.timeline, self.times, strict=True):
            if (task is None or ranks[0] in task.ranks) and time.end_s > time.start_s:
                start, last = float(begin[index].min()), float(end[index].max())
                mean = min(start + float(own[index].mean()), last)
                spans.append(TaskSpan(time.name, time.kind, start, mean, last))
        compute, communicate = (
            float(x[index].mean()) / step if step else 0.0 for x in (self.computing, self.communicating)
        )
        longest = float((self.computing + self.communicating)[index].max())
        memory = memory_of(self.plan, ranks[0], self.costs, self.hardware)
        return RankSet(ranks, compute, communicate, max(0.0, 1 - compute - communicate), longest, tuple(spans), memory)

    def _notes(self) -> tuple[str, ...]:
        free = [
            n.id
            for n in self.plan.flow.order
            if n.id not in self.costs.seconds and (n.type == "compute" or n.role not in self.costs.models)
        ]
        notes = [f"no cost is known for {', '.join(free)}: 0 s is assumed; give --node-seconds"] if free else []
        if self.plan.flow.sampling_node:
            notes.append("dynamic sampling: one round is assumed")
        return tuple(notes)
