"""With a delay, ranks that generate run ahead, always with the weights of exactly that many steps before."""

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from cases import KINDS, Source, check_and_write, column
from distflow.batch.batch import NO_SAMPLES, Batch
from distflow.batch.context import Context
from distflow.comm.collectives import SendReceive
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.errors import ConfigError, PlacementError
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Place, Placement, Plan, RunNode, Workload, plan
from distflow.roles.role import Role
from distflow.run.async_comm import AsyncComm, CommThread
from distflow.run.comm import Comm
from distflow.run.evaluation import Evaluation
from distflow.run.mailbox import Mailbox
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from hub import Hub
from simulate import simulate

STEPS = 7


class Actor(Role):
    """Has a number for its weights: the updates so far. Where it generates, the number that was synced."""

    def __init__(self, rank: int, plan: Plan, progress: dict[int, int], first: int = 0) -> None:
        self.rank, self.delay, self.first, self.progress = rank, plan.staleness, first, progress
        self.rng = random.Random(rank)
        layouts = {n.id: plan.partition_of(n.id).layout.ranks for n in plan.flow.nodes if n.method}
        self.sources, self.destinations = layouts["update"], layouts["generate"]
        self.updates = self.version = first
        self.synced: list[int] = []

    def copy_weights(self) -> int:
        return self.updates

    def sync_weights(self, version: int, weights: int | None = None) -> Iterator[SendReceive]:
        source = {t: self.sources[i % len(self.sources)] for i, t in enumerate(self.destinations)}
        if self.rank in self.destinations:
            data = torch.zeros(1, dtype=torch.int64)
            yield SendReceive(0, lambda out: None, {}, data.view(torch.uint8), {source[self.rank]: (0, 8)})
            self.version = int(data)
            assert self.version == version
            self.synced.append(version)
        elif mine := [t for t, g in source.items() if g == self.rank]:
            number = torch.tensor([self.updates if weights is None else weights]).view(torch.uint8)
            nothing = torch.empty(0, dtype=torch.uint8)
            yield SendReceive(8, lambda out: out.copy_(number), dict.fromkeys(mine, (0, 8)), nothing, {})

    def generate(self, batch: Batch, ctx: Context, writes: list[str]) -> dict[str, Any]:
        assert self.version == max(self.first, ctx.step - 1 - self.delay), (self.version, ctx.step)
        assert ctx.step - 1 - min(self.progress.values()) <= self.delay  # nobody is further ahead
        if ctx.chunks:  # some leave early, in an order and at times of this worker's own
            for i in self.rng.sample(range(len(ctx.chunks.parts)), len(ctx.chunks.parts) - 1):
                time.sleep(self.rng.choice([0, 0, 0.01]))
                ids = batch.ids[ctx.chunks.parts[i]]
                ctx.chunks.leave(i, {w: column(w, ids) if len(ids) else NO_SAMPLES for w in writes})
        return {w: column(w, batch.ids) if len(batch) else NO_SAMPLES for w in writes}

    def evaluate(self, batch: Batch, ctx: Context, writes: list[str]) -> dict[str, Any]:
        assert ctx.held_out
        ctx.metrics.log("val/version", self.version)
        return {w: column(w, batch.ids) if len(batch) else NO_SAMPLES for w in writes}

    def update(self, batch: Batch, ctx: Context) -> None:
        self.updates += 1
        assert self.updates == ctx.step
        self.progress[self.rank] = self.updates


def random_loop(rng: random.Random, workers: int, delay: int, chunks: int = 1) -> Plan:
    """Nodes around one that generates and one that trains, on any ranks; also from those that train to the others."""
    ranks = rng.sample(range(workers), workers)
    cut = rng.randint(1, workers - 1)
    sets = {"rollout": sorted(ranks[:cut]), "train": sorted(ranks[cut : rng.randint(cut + 1, workers)])}
    sets["some"] = sorted(rng.sample(range(workers), rng.randint(1, workers)))
    repeat, fields, nodes = rng.choice([1, 2]), list(Source.column_names), list[Node]()
    before, after = 0 if chunks > 1 else rng.randint(0, 2), rng.randint(0, 4)
    for i in range(before + after + 2):
        reads = tuple(rng.sample(fields, rng.randint(1, min(3, len(fields)))))
        writes = tuple(f"f{i}{j}.{rng.choice(KINDS).replace(' ', '_')}" for j in range(rng.randint(1, 2)))
        if i == before:
            params: dict[str, Any] = {"writes": list(writes)}
            fn = Actor.generate
            options: dict[str, Any] = {"type": "inference", "generates": True, "method": True, "role": "actor"}
            nodes.append(Node("generate", reads=reads, writes=writes, fn=fn, params=params, **options))
        elif i == before + after + 1:
            options = {"type": "train", "method": True, "role": "actor"}
            nodes.append(
                Node(
                    "update",
                    reads=tuple(dict.fromkeys((*reads[:1], *nodes[before].writes))),
                    fn=Actor.update,
                    **options,
                )
            )
            writes = ()
        else:
            params = {"node": f"n{i}", "writes": list(writes), "whole": False, "repeat": repeat}
            balance = rng.choice(reads) if rng.random() < 0.3 else None
            nodes.append(Node(f"n{i}", reads=reads, writes=writes, fn=check_and_write, params=params, balance=balance))
        fields += [f for f in writes if f not in fields]
    places = {n.id: Place(rng.choice(list(sets))) for n in nodes}
    places |= {"generate": Place("rollout"), "update": Place("train")}
    rank_sets = {name: ",".join(map(str, r)) for name, r in sets.items()}
    flow, placement = Flow("loop", Source.column_names, tuple(nodes)), Placement(workers, rank_sets, nodes=places)
    if chunks == 1:
        return plan(flow, placement, Workload(rng.randint(1, 6), repeat), staleness=delay)
    chunk = math.lcm(*(len(r) for r in sets.values()))
    return plan(flow, placement, Workload(chunk * chunks, repeat), staleness=delay, chunk=chunk)


def chunked_loops(count: int, delay: int) -> Iterator[Plan]:
    """Yields random plans in which some node runs chunk by chunk."""
    found = 0
    for seed in range(10 * count):
        with suppress(PlacementError):  # no node can
            p = random_loop(random.Random(seed), 2 + seed % 4, delay, chunks=2 + seed % 2)
            found += 1
            if found <= count:
                yield p
    assert found >= count


def actor_of(worker: Worker) -> Actor:
    actor = worker.comm.roles["actor"]
    assert isinstance(actor, Actor)
    return actor


def make_worker(rank: int, plan: Plan, progress: dict[int, int], first: int = 0, steps: int = STEPS) -> Worker:
    actor = Actor(rank, plan, progress, first)
    comm = Comm(rank, plan, {"actor": actor}, Versions(plan.staleness, first, first + steps))
    data = Coordinator(rank, plan, Loader(Source(), plan.samples // plan.repeat, plan.repeat, seed=0))
    return Worker(data, comm)


@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_in_one_order_of_all_ranks_nothing_deadlocks_although_nothing_is_buffered(delay: int) -> None:
    for seed in range(20):
        p = random_loop(random.Random(seed), 2 + seed % 5, delay)
        progress = dict.fromkeys(p.partition_of("update").layout.ranks, 0)
        workers = {r: make_worker(r, p, progress) for r in range(p.workers)}
        simulate({r: w.steps(lambda *_: None) for r, w in workers.items()})
        for r in p.partition_of("generate").layout.ranks:
            versions = actor_of(workers[r]).synced
            assert versions == (list(range(STEPS)) if not delay else list(range(max(1, STEPS - delay))))


def collect(all_metrics: list[StepMetrics], step: int, metrics: StepMetrics) -> None:
    all_metrics.append(metrics)


@pytest.mark.parametrize("delay", [0, 2])
def test_chunks_bring_every_field_of_every_sample_and_nothing_deadlocks(delay: int) -> None:
    by_chunk = set[bool]()
    for p in chunked_loops(15, delay):
        progress = dict.fromkeys(p.partition_of("update").layout.ranks, 0)
        workers = {r: make_worker(r, p, progress, steps=3) for r in range(p.workers)}
        metrics: dict[int, list[StepMetrics]] = {r: [] for r in workers}
        simulate({r: w.steps(partial(collect, metrics[r])) for r, w in workers.items()})
        for n in (n for n in p.flow.nodes if not n.method):
            for step in range(3):
                counts = [m[step].totals.get((f"samples/{n.id}", "sum"), (0, 0))[0] for m in metrics.values()]
                assert sum(counts) == p.samples
            by_chunk.add(any(isinstance(t, RunNode) and t.node == n.id and bool(t.partition.chunk) for t in p.tasks))
    assert by_chunk == {True, False}  # some nodes see the whole step


def held_out_plan(p: Plan) -> Plan:
    """Generates where training does, and scores where it trains."""
    params = {"node": "score", "writes": ["f1.score"], "whole": False, "repeat": 1}
    nodes = (
        Node(
            "evaluate",
            "actor",
            "inference",
            Source.column_names[:1],
            ("f0.tokens",),
            params={"writes": ["f0.tokens"]},
            generates=True,
            method=True,
            fn=Actor.evaluate,
        ),
        Node("score", reads=("f0.tokens",), writes=("f1.score",), fn=check_and_write, params=params),
    )
    ranks = {n: p.partition_of(n).layout.ranks for n in ("generate", "update")}
    sets = {n: ",".join(map(str, r)) for n, r in ranks.items()}
    places = {"evaluate": Place("generate"), "score": Place("update")}
    flow, placement = Flow("held out", Source.column_names, nodes), Placement(p.workers, sets, nodes=places)
    return plan(flow, placement, Workload(5, 1), {"actor": ranks["update"]})


class Team:
    """All workers of a plan in threads, with a thread more each for communication; they evaluate every few steps."""

    def __init__(self, plan: Plan, first: int, evaluate_every: int = 0) -> None:
        self.plan, self.first, self.hub, self.evaluate_every = plan, first, Hub(plan.workers), evaluate_every
        self.progress = dict.fromkeys(plan.partition_of("update").layout.ranks, first)
        self.rows: list[dict[str, float]] = []  # of each step
        self.copies: list[int] = []  # of weights that a worker has kept, at the end of steps
        self.errors: list[BaseException] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self.work, args=(r,)) for r in range(self.plan.workers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def work(self, rank: int) -> None:
        try:
            self.work_as(rank)
        except BaseException as e:
            self.errors.append(e)

    def work_as(self, rank: int) -> None:
        worker = make_worker(rank, self.plan, self.progress, self.first)
        sink = (lambda step, row: self.rows.append(row)) if rank == 0 else None
        reducer = MetricsReducer(rank, range(self.plan.workers), sink)
        evaluation = self.evaluation(worker) if self.evaluate_every else None
        comm = AsyncComm(worker, evaluation, reducer, CommThread(lambda c: self.hub.run(rank, c)))
        comm.start()

        def after_step(step: int, metrics: StepMetrics) -> Any:
            self.copies.append(sum("weights" in str(key) for key in list(comm.mail._values)))
            if evaluation:
                yield from evaluation(step, metrics)
            yield from comm.reduce(reducer, step, metrics, False)

        chain = worker.steps(lambda *_: None, after_step, comm.after_chain)
        assert list(chain) == []  # the chain itself communicates nothing
        assert not comm.mail._values, "something is left"
        reducer.wait()
        reducer.close()

    def evaluation(self, worker: Worker) -> Evaluation:
        p = held_out_plan(self.plan)
        data = Coordinator(worker.rank, p, Loader(Source(), 5, 1, seed=0, rewind=True))
        return Evaluation(Worker(data, worker.comm, held_out=True), self.evaluate_every, self.first + STEPS)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_an_evaluation_is_of_the_step_that_it_is_logged_with_however_far_others_are_ahead(delay: int) -> None:
    for seed in range(6):
        rng = random.Random(2000 + seed)
        team = Team(random_loop(rng, 2 + seed % 4, delay), rng.choice([0, 3]), evaluate_every=rng.choice([1, 2, 3]))
        team.run()
        assert not team.errors, (seed, team.errors[0])
        steps = range(team.first + 1, team.first + STEPS + 1)
        due = [step for step in steps if step % team.evaluate_every == 0 or step == steps[-1]]
        versions = {step: row.get("val/version") for step, row in zip(steps, team.rows, strict=True)}
        assert versions == {step: float(step) if step in due else None for step in steps}


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_with_a_thread_for_communication_nothing_is_stuck_and_all_metrics_are_reduced(delay: int) -> None:
    for seed in range(12):
        rng = random.Random(1000 + seed)
        team = Team(random_loop(rng, 2 + seed % 4, delay), rng.choice([0, 3]))
        team.run()
        assert not team.errors, (seed, team.errors[0])
        assert max(team.copies) <= delay + 1
        assert len(team.rows) == STEPS
        for n in (n for n in team.plan.flow.nodes if not n.method):
            assert {row[f"samples/{n.id}"] for row in team.rows} == {team.plan.samples}


@pytest.mark.parametrize("delay", [0, 1])
def test_with_a_thread_chunks_leave_before_the_others(delay: int) -> None:
    for p in chunked_loops(8, delay):
        team = Team(p, 0)
        team.run()
        assert not team.errors, team.errors[0]
        assert len(team.rows) == STEPS
        for n in (n for n in p.flow.nodes if not n.method):
            assert {row[f"samples/{n.id}"] for row in team.rows} == {p.samples}


def test_a_worker_that_fails_in_its_thread_says_so_to_whom_it_keeps_waiting() -> None:
    mail = Mailbox()
    mail.put("a", 1)
    mail.fail(ConfigError("broken"))
    assert mail.take("a") == 1  # what came before is still there
    with pytest.raises(ConfigError, match="broken"):
        mail.take("b")


class Moved(Role):
    def sync_weights(self, version: int, weights: Any = None) -> Iterator[SendReceive]:
        yield from ()


def test_a_role_that_cannot_copy_its_weights_is_refused() -> None:
    p = random_loop(random.Random(0), 3, 1)
    rank = p.partition_of("update").layout.ranks[0]
    with pytest.raises(
        ConfigError, match=r"roles.actor: rollout.staleness and rollout.chunk need copies, and Moved has no method"
    ):
        Comm(rank, p, {"actor": Moved()}, Versions(1))


def test_a_role_that_generates_and_cannot_move_its_weights_is_refused() -> None:
    p = random_loop(random.Random(0), 3, 0)
    rank = p.partition_of("update").layout.ranks[0]
    with pytest.raises(ConfigError, match=r"roles.actor: .* Role has no method `sync_weights`"):
        Comm(rank, p, {"actor": Role()}, Versions())
