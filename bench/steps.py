"""Whole steps of GRPO or PPO without a model: moves, weight sync, votes and checkpoints are real, compute is a sleep.

Used by bench/control.py and bench/scaling.py; not run by itself. `run_steps` is one worker; fork it on hosts of
tests/hosts.py.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.checkpoint.store import load_tensors
from distflow.checkpoint.writer import CheckpointWriter
from distflow.cluster.launch_env import read_launch_env
from distflow.cluster.rendezvous import Rendezvous
from distflow.comm.collectives import Communication, all_gather_bytes
from distflow.comm.shared_memory import host_id
from distflow.comm.transport import Transport
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.errors import PeerLostError
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Place, Placement, Plan, Workload
from distflow.plan import plan as derive_plan
from distflow.plan.topology import Topology
from distflow.roles.role import Role
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Surroundings, Worker
from distflow.run_folder import checkpoint_dir
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.state import RoleState
from distflow.weights.sync import WeightSync

INTS, LOGPROBS = ("tokens", "mask", "position"), ("old_logprobs", "ref_logprobs")
TOKEN_BYTES = dict.fromkeys(INTS, 8) | dict.fromkeys((*LOGPROBS, "advantage"), 4)
CRITIC = ("values", "returns")  # fields that PPO has besides
# Of the compute of a step of GRPO; with a critic of the actor's size, PPO has 1.4 times as much.
ROLLOUT = {25: (0,), 50: (0, 2), 75: (0, 1, 2)}  # percent → which of four ranks generate
COMPUTE = {"generate": 0.5, "old": 0.1, "ref": 0.1, "update": 0.3, "values": 0.1, "update_critic": 0.3}
CPU = torch.device("cpu")
GROUP = 8  # responses to a prompt


@dataclass(frozen=True)
class Work:
    """A step of a weak scaling: `rows` and `compute_s` per worker are the same for any number of workers."""

    rows: int
    tokens: int  # mean of a row; lengths are log-normal
    hidden: int  # of the model whose weights are synced and saved
    layers: int
    compute_s: float = 0.0
    save: bool = True  # a checkpoint after every step
    split: bool = False  # some ranks train on what others generate: everything changes its owner
    rollout: int = 50  # percent of the ranks that generate, if they are split: 25, 50 or 75
    tp: int = 2  # of generation, if they are not
    shared: bool = False  # compute is that of all workers, and divided among those that do it
    ppo: bool = False
    balance: bool = True
    by_tokens: bool = False  # compute is in proportion to the tokens of a worker's samples, but for generation

    @property
    def token_bytes(self) -> dict[str, int]:
        return TOKEN_BYTES | (dict.fromkeys(CRITIC, 4) if self.ppo else {})


class EmptyRows:
    column_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {}


def lengths(ids: Sequence[int] | np.ndarray, mean: int) -> np.ndarray:
    """Returns the length of each sample, log-normal, a function of its id."""
    x = (np.asarray(ids, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    u, v = ((x >> np.uint64(k) & np.uint64(0xFFFFFF)).astype(float) / (1 << 24) for k in (8, 36))
    normal = np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)
    return np.maximum(1, mean * np.exp(0.5 * normal - 0.125)).astype(np.int64)


class Actor(Role):
    """The nodes of the actor and the reference; the weights are those of a transformer of equal layers."""

    def __init__(self, rank: int, plan: Plan, work: Work, topology: Topology) -> None:
        self.work, self.plan = work, plan
        generate, train = (plan.partition_of(n).layout for n in ("generate", "update"))
        specs = model_specs(work.hidden, work.layers)
        source, target = Shards(train, train.dp), Shards(generate, 1)
        self.train, self.shards, self.specs = train, source, {s.name: s for s in specs}
        self.weight_sync_plan = WeightSync(specs, source, target, rank, torch.float32, topology)
        self.held = _zeros(specs, source, rank)
        self.filled = _zeros(specs, target, rank)

    def state(self) -> RoleState:
        return RoleState({}, self.held, self.specs, self.shards)

    def sync_weights(self, version: int, weights: Any = None) -> Iterator[Any]:
        yield from self.weight_sync_plan.run(self.held, self.filled)

    def generate(self, batch: Batch) -> dict[str, Ragged]:
        self._compute("generate")
        n = lengths(batch.ids, self.work.tokens)
        return {f: Ragged.packed(_values(f, torch.int64, n), n) for f in INTS}

    def old(self, batch: Batch) -> Ragged:
        self._compute("old", batch)
        return _like(batch["tokens"], "old_logprobs")

    def ref(self, batch: Batch) -> Ragged:
        self._compute("ref", batch)
        return _like(batch["tokens"], "ref_logprobs")

    def values(self, batch: Batch) -> Ragged:
        self._compute("values", batch)
        return _like(batch["tokens"], "values")

    def update(self, batch: Batch) -> None:
        self._compute("update", batch)
        assert all(len(batch[f]) == len(batch) for f in TOKEN_BYTES)

    def update_critic(self, batch: Batch) -> None:
        self._compute("update_critic", batch)
        assert all(len(batch[f]) == len(batch) for f in (*INTS, *CRITIC))

    def _compute(self, node: str, batch: Batch | None = None) -> None:
        share = compute_share(self.plan, node) if self.work.shared else 1.0
        if self.work.by_tokens and batch is not None:
            share *= float(batch["tokens"].lengths.sum()) / (self.work.rows * self.work.tokens)
        time.sleep(self.work.compute_s * COMPUTE[node] * share)


def compute_share(plan: Plan, node: str) -> float:
    """Returns how much more a rank of a node computes than if all ranks did."""
    return plan.workers / len(plan.partition_of(node).layout.ranks)


def judge(batch: Batch) -> Tensor:
    return torch.zeros(len(batch))


def advantage(batch: Batch) -> Ragged:
    return _like(batch["tokens"], "advantage")


def gae(batch: Batch) -> dict[str, Ragged]:
    return {f: _like(batch["tokens"], f) for f in ("advantage", "returns")}


def _like(tokens: Any, field: str) -> Ragged:
    return Ragged.packed(_values(field, torch.float32, tokens.lengths), tokens.lengths)


_made: dict[str, Tensor] = {}  # field → the values of all steps


def _values(field: str, dtype: torch.dtype, lengths: np.ndarray) -> Tensor:
    """Returns a field of samples, whose making is compute and takes no time here, as with the peers: made once."""
    size = int(lengths.sum())
    if field not in _made or len(_made[field]) < size:
        _made[field] = torch.zeros(size + size // 2, dtype=dtype)
    return _made[field][:size]


def model_specs(hidden: int, layers: int) -> list[TensorSpec]:
    """Returns the parameters of a Qwen-like model without its embeddings, 12 × hidden² for each layer."""
    specs = []
    for i in range(layers):
        specs += [TensorSpec(f"{i}.{p}", (hidden, hidden), 0) for p in ("q", "k", "v")]
        specs += [TensorSpec(f"{i}.{p}", (3 * hidden, hidden), 0) for p in ("gate", "up")]
        specs += [TensorSpec(f"{i}.o", (hidden, hidden), 1), TensorSpec(f"{i}.down", (hidden, 3 * hidden), 1)]
        specs += [TensorSpec(f"{i}.{p}", (hidden,)) for p in ("norm1", "norm2")]
    return specs


def weight_bytes(work: Work) -> int:
    return 4 * sum(prod(s.shape) for s in model_specs(work.hidden, work.layers))


def _zeros(specs: list[TensorSpec], shards: Shards, rank: int) -> dict[str, Tensor]:
    if rank not in shards.layout.ranks:
        return {}
    return {s.name: torch.zeros([b - a for a, b in shards.box(s, rank)]) for s in specs}


def make_plan(workers: int, work: Work) -> Plan:
    balance = "tokens" if work.balance else None

    def method(name: str, role: str = "actor", **more: Any) -> Node:
        return Node(name, role=role, call=f"{role}.{name}", method=True, fn=getattr(Actor, name), **more)

    generate = method("generate", type="inference", writes=INTS, generates=True)
    logprobs = [("old", "actor", "old_logprobs"), ("ref", "actor", "ref_logprobs")]
    logprobs += [("values", "critic", "values")] * work.ppo
    forward = [
        method(name, role, type="inference", reads=INTS, writes=(field,), balance=balance)
        for name, role, field in logprobs
    ]
    score = Node("judge", reads=("tokens",), writes=("score",), balance=balance, fn=judge)
    updates = [method("update", type="train", reads=(*INTS, *LOGPROBS, "advantage"), balance=balance)]
    if work.ppo:
        reads: tuple[str, ...] = ("tokens", "score", "values")
        estimate = Node("gae", reads=reads, writes=("advantage", "returns"), balance=balance, fn=gae)
        updates.append(method("update_critic", "critic", type="train", reads=(*INTS, *CRITIC), balance=balance))
    else:
        reads = ("tokens", "score")
        estimate = Node(
            "advantage", reads=reads, writes=("advantage",), whole_groups=True, balance=balance, fn=advantage
        )
    nodes = (generate, *forward, score, estimate, *updates)
    sets, places, default = {}, {"generate": Place(tp=work.tp)}, Place()
    if work.split:
        of = {"rollout": ROLLOUT[work.rollout], "train": set(range(4)) - set(ROLLOUT[work.rollout])}
        sets = {name: ",".join(str(r) for r in range(workers) if r % 4 in some) for name, some in of.items()}
        places, default = {"generate": Place("rollout")}, Place("train")
    placement = Placement(workers, sets, default, nodes=places)
    sizes = {f: b * work.tokens for f, b in work.token_bytes.items()}
    workload = Workload(work.rows * workers // GROUP, GROUP, sizes)
    return derive_plan(Flow("grpo", (), nodes), placement, workload)


@dataclass
class Joined:
    """A worker that knows all others."""

    rank: int
    workers: int
    transport: Transport
    background: Transport  # of the thread that writes checkpoints
    topology: Topology
    start_up_s: float
    start_up_cpu_s: float
    rendezvous: Rendezvous


def join() -> Joined:
    """Meets the other workers, as the environment says, and learns who is on which host."""
    start, cpu = time.perf_counter(), time.process_time()
    env = read_launch_env()
    assert env is not None
    rendezvous = Rendezvous(env, timedelta(seconds=300))
    transport, background = (
        Transport(env.rank, env.workers, rendezvous.store, rendezvous.address, CPU, lambda _: nullcontext(), name)
        for name in ("main", "background")
    )
    rendezvous.wait_for_all()
    hosts = transport.run(all_gather_bytes(env.rank, range(env.workers), host_id().encode()))
    topology = Topology.of([h.decode() for h in hosts])
    for t in (transport, background):
        t.use(topology)
    spent = time.perf_counter() - start, time.process_time() - cpu
    return Joined(env.rank, env.workers, transport, background, topology, *spent, rendezvous)


def _private_mib() -> float:
    """Returns the memory that is this process's alone, with its page tables."""
    lines = [
        *Path("/proc/self/smaps_rollup").read_text().splitlines(),
        *Path("/proc/self/status").read_text().splitlines(),
    ]
    kib = (int(line.split()[1]) for line in lines if line.startswith(("Private_", "VmPTE")))
    return sum(kib) / 1024


def run_steps(_: int, work: Work, steps: int, folder: str, first: int = 0) -> dict[str, Any]:
    """One worker: returns what it has spent on each step, and when each step ended.

    With `first`, it goes on from the checkpoint of that step to `steps`. If another worker is gone, `lost` says when
    that was noticed.
    """
    inherited = len(os.listdir("/proc/self/fd"))
    me = join()
    plan = make_plan(me.workers, work)
    actor = Actor(me.rank, plan, work, me.topology)
    loader = Loader(EmptyRows(), plan.samples // plan.repeat, plan.repeat, seed=0)
    data = Coordinator(me.rank, plan, loader, me.topology)
    versions = Versions(plan.staleness, first, steps)
    roles = {"actor": actor} | ({"critic": actor} if work.ppo else {})  # a critic that is saved with the actor
    worker = Worker(data, Comm(me.rank, plan, roles, versions), Surroundings(0, Path(folder)))
    ranks, transports = range(me.workers), (me.transport, me.background)
    reducer = MetricsReducer(me.rank, ranks, None)
    writer = CheckpointWriter(Path(folder), me.rank, ranks, {"actor": actor.train.ranks}, me.background.run)
    rows: list[dict[str, float]] = []

    def after_step(step: int, metrics: StepMetrics) -> Communication[None]:
        yield from reducer.reduce(step, metrics)  # the vote whether to stop goes with the metrics

    def end_of_step(step: int, _: StepMetrics) -> None:
        if work.save:
            states = {"actor": actor.state()} if me.rank in actor.train.ranks else {}
            writer.save(step, writer.copy(states), {}, lambda _: None)
        rows.append(count())

    def count() -> dict[str, float]:
        return {
            "end": time.monotonic(),
            "cpu_s": time.process_time(),
            "messages": sum(t.messages for t in transports),
            "bytes": sum(t.bytes for t in transports),
            "connections": sum(t.connections for t in transports),
            "open_files": len(os.listdir("/proc/self/fd")) - inherited,
            "private_mib": _private_mib(),
        }

    if first and me.rank in actor.train.ranks:
        load_tensors(checkpoint_dir(Path(folder), first) / "actor", actor.state(), me.rank)
    rows.append(count())
    result = {"start_up_s": me.start_up_s, "start_up_cpu_s": me.start_up_cpu_s, "rows": rows, "lost": None}
    try:
        me.transport.run(worker.steps(end_of_step, after_step))
        writer.wait()
    except PeerLostError:
        return result | {"lost": time.monotonic()}
    writer.close()
    return result
