"""Promises that need real processes and real sockets: every field arrives, and there is no central process."""

import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from cases import Source, random_plan
from distflow.batch.batch import Batch
from distflow.comm.collectives import SendReceive, barrier
from distflow.comm.transport import SHARED_MEMORY
from distflow.coordinator.coordinator import Coordinator, StepTraffic
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Place, Placement, Plan, RunNode, Workload
from distflow.plan import plan as make_plan
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from spawn import make_transport, spawn

WORKERS = [1, 2, 4, 8]


def run_worker(rank: int, plan: Plan, steps: int) -> tuple[list[dict[str, float]], list[StepTraffic]]:
    """Runs one rank of a plan; returns the reduced metrics and its own traffic of each step."""
    transport = make_transport(rank, plan.workers)
    data = Coordinator(rank, plan, Loader(Source(), plan.samples // plan.repeat, plan.repeat, seed=0))
    reduced: list[dict[str, float]] = []
    reducer = MetricsReducer(rank, range(plan.workers), lambda _, numbers: reduced.append(numbers))
    traffic: list[StepTraffic] = []
    end_step = data.end_step
    data.end_step = lambda step: traffic.append(end_step(step)) or traffic[-1]  # type: ignore[method-assign, func-returns-value]
    worker = Worker(data, Comm(rank, plan, {}, Versions(last=steps)))
    transport.run(worker.steps(lambda *_: None, reducer.reduce))
    reducer.wait()
    reducer.close()
    data.close()
    return reduced, traffic


def run_random_graphs(rank: int, workers: int, seeds: range, shared_memory: str) -> None:
    os.environ[SHARED_MEMORY] = shared_memory
    for seed in seeds:
        plan = random_plan(random.Random(seed), workers)
        for numbers in run_worker(rank, plan, 2)[0]:
            for task in plan.tasks:
                if isinstance(task, RunNode):
                    once, handled = plan.samples, numbers[f"samples/{task.node}"]
                    assert handled >= once if task.node in plan.flow.sampling_loop else handled == once, (seed, task)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_every_field_arrives_between_real_processes(workers: int, shared_memory: str) -> None:
    spawn(workers, run_random_graphs, workers, range(10), shared_memory)


def write_tokens(batch: Batch) -> dict[str, Any]:
    lengths = [int(np.random.default_rng(int(i)).lognormal(6, 0.5)) for i in batch.ids]
    return {"tokens": [torch.arange(n) for n in lengths], "logprobs": [torch.zeros(n) for n in lengths]}


def read_tokens(batch: Batch) -> None:
    assert all((row == torch.arange(len(row))).all() for row in batch["tokens"])


def proportional_plan(workers: int) -> Plan:
    """The batch per worker is fixed. All generate, half of them judge, all train, with tp 2 and balanced."""
    nodes = (
        Node("generate", writes=("tokens", "logprobs"), fn=write_tokens),
        Node("judge", reads=("tokens",), fn=read_tokens),
        Node("update", reads=("tokens", "logprobs"), balance="tokens", fn=read_tokens),
    )
    places = {"judge": Place("half"), "update": Place(tp=2)}
    placement = Placement(workers, {"half": "50%-"}, nodes=places)
    return make_plan(Flow("proportional", (), nodes), placement, Workload(prompts=64 * workers))


def run_proportional(rank: int, workers: int) -> list[StepTraffic]:
    return run_worker(rank, proportional_plan(workers), 2)[1]


def test_no_worker_carries_more_when_there_are_more_workers() -> None:
    busiest = {}
    for n in (2, 4, 8):
        traffic = spawn(n, run_proportional, n)
        busiest[n] = [
            max(max(getattr(t, direction) for t in steps) for steps in traffic) for direction in ("sent", "received")
        ]
    for n in (4, 8):
        for few, many in zip(busiest[2], busiest[n], strict=True):
            assert many < 1.15 * few, busiest


def run_late_reader(rank: int, shared_memory: str) -> None:
    os.environ[SHARED_MEMORY] = shared_memory
    all_ranks, size = (0, 1, 2), 1 << 16
    transport = make_transport(rank, 3)
    for turn in range(8):
        receivers = all_ranks if turn % 2 else (2,)  # who only sends does not wait for receivers
        others = [r for r in all_ranks if r != rank]
        out = torch.empty(3 * size, dtype=torch.uint8)
        if rank == 2:
            time.sleep(0.05)  # the slowest rank
        value = 16 * rank + turn
        send = {r: (0, size) for r in others if r in receivers}
        receive = {r: (r * size, (r + 1) * size) for r in others if rank in receivers}
        transport.execute(SendReceive(size, lambda data, value=value: data.fill_(value), send, out, receive))  # type: ignore[misc]
        for sender in receive:
            assert (out.split(size)[sender] == 16 * sender + turn).all(), (turn, sender)


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_sent_bytes_stay_until_the_slowest_rank_has_read_them(shared_memory: str) -> None:
    spawn(3, run_late_reader, shared_memory)


def write_differently(batch: Batch, ctx: Any) -> Any:
    return [1] * len(batch) if ctx.rank else torch.ones(len(batch))


def run_disagreeing(rank: int) -> str:
    nodes = (Node("score", writes=("score",), fn=write_differently), Node("use", reads=("score",), fn=read_tokens))
    plan = make_plan(Flow("f", (), nodes), Placement(2, nodes={"use": Place(tp=2)}), Workload(4))
    with pytest.raises(Exception, match="write the same type everywhere") as e:
        run_worker(rank, plan, 1)
    return str(e.value)


def test_an_error_names_the_field_that_workers_write_with_different_types() -> None:
    assert "field 'score' is" in spawn(2, run_disagreeing)[0]


def run_metrics(rank: int) -> list[dict[str, float]]:
    reduced: list[dict[str, float]] = []
    transport = make_transport(rank, 3)
    reducer = MetricsReducer(rank, range(3), lambda _, numbers: reduced.append(numbers))
    for step in range(3):
        metrics = StepMetrics()
        metrics.log("reward/mean", value=float(rank), count=rank + 1)
        metrics.log("length/max", 10.0 * rank, reduce="max")
        metrics.log("length/min", 10.0 * rank, reduce="min")
        metrics.log("tokens", 5, reduce="sum")
        if rank == 1 and step == 1:  # a metric that one worker has, once
            metrics.log("rare/thing", 7.0)
        assert transport.run(reducer.reduce(step, metrics, vote=rank == step == 2)) == (step == 2)
    reducer.wait()
    reducer.close()
    return reduced


def test_metrics_are_weighted_by_counts_over_all_workers() -> None:
    by_rank = spawn(3, run_metrics)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0][0] == {
        "reward/mean": (0 * 1 + 1 * 2 + 2 * 3) / 6,
        "length/max": 20.0,
        "length/min": 0.0,
        "tokens": 15.0,
    }
    assert by_rank[0][1]["rare/thing"] == 7.0
    assert "rare/thing" not in by_rank[0][2]


def run_without_memfd(rank: int, seeds: range) -> list[bool]:
    if rank == 1:  # as in a sandbox that forbids it on one of the hosts

        def forbidden(name: str) -> int:
            raise PermissionError(name)

        os.memfd_create = forbidden  # type: ignore[assignment]
    transport = make_transport(rank, 3)
    run_random_graphs(rank, 3, seeds, "1")
    transport.run(barrier(rank, range(3)))
    return [transport._outgoing[r].shared for r in sorted(transport._outgoing)]


def test_sockets_are_used_where_memory_cannot_be_shared() -> None:
    """A worker that may not create shared memory sends by socket; it can still receive through that of others."""
    shared = spawn(3, run_without_memfd, range(3))
    assert all(shared[0])
    assert not any(shared[1])
    assert all(shared[2])
