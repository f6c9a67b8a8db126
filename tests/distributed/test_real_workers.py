"""Promises that need real processes and real sockets: every field arrives, no centre."""

import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import Source, random_plan
from distflow.data.batch import Batch
from distflow.data.coordinator import Coordinator, Traffic
from distflow.data.exchange import AllToAll
from distflow.data.loader import Loader
from distflow.data.transport import SHARED_MEMORY, Transport
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Place, Placement, Plan, Run, Workload, plan
from distflow.run.worker import Worker
from spawn import spawn

WORKERS = [1, 2, 4, 8]


def run_worker(rank: int, made: Plan, steps: int) -> tuple[list[dict[str, float]], list[Traffic]]:
    """Rank's part of a plan over gloo; the reduced metrics and its own traffic, per step."""
    everybody = tuple(range(made.workers))
    comm = Transport([everybody, *(m.ranks for m in made.moves)], torch.device("cpu"), lambda _: nullcontext())
    data = Coordinator(rank, made, Loader(Source(), made.samples // made.repeat, made.repeat, seed=0))
    reduced: list[dict[str, float]] = []
    group = torch.distributed.new_group(backend="gloo") if made.workers > 1 else None
    reducer = MetricsReducer(group, lambda _, numbers: reduced.append(numbers))
    traffic: list[Traffic] = []
    end = data.end
    data.end = lambda step: traffic.append(end(step)) or traffic[-1]  # type: ignore[method-assign, func-returns-value]
    worker = Worker(rank, made, data, {}, 0, Path(), lambda *_: None)
    comm.drive(worker.steps(0, steps, reducer.submit))
    reducer.wait(0)
    reducer.close()
    data.close()
    return reduced, traffic


def run_random_graphs(rank: int, workers: int, seeds: range, shared_memory: str) -> None:
    os.environ[SHARED_MEMORY] = shared_memory
    for seed in seeds:
        made = random_plan(random.Random(seed), workers)
        for numbers in run_worker(rank, made, 2)[0]:
            for task in made.tasks:
                if isinstance(task, Run):
                    once, handled = made.samples * task.partition.layout.tp, numbers[f"samples/{task.node}"]
                    assert handled >= once if task.node in made.flow.refill_loop else handled == once, (seed, task)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_every_field_arrives_between_real_processes(workers: int, shared_memory: str) -> None:
    spawn(workers, run_random_graphs, workers, range(10), shared_memory)


def write_tokens(batch: Batch) -> dict[str, Any]:
    lengths = [int(np.random.default_rng(int(i)).lognormal(6, 0.5)) for i in batch.ids]
    return {"tokens": [torch.arange(n) for n in lengths], "logprobs": [torch.zeros(n) for n in lengths]}


def read_tokens(batch: Batch) -> None:
    assert all((row == torch.arange(len(row))).all() for row in batch["tokens"])


def growing_plan(workers: int) -> Plan:
    """The per-worker batch is fixed. All generate, half of them judge, all train, in pairs and evenly loaded."""
    nodes = (
        Node("generate", writes=("tokens", "logprobs"), fn=write_tokens),
        Node("judge", reads=("tokens",), fn=read_tokens),
        Node("update", reads=("tokens", "logprobs"), balance="tokens", fn=read_tokens),
    )
    places = {"judge": Place("half"), "update": Place(tp=2)}
    made = Placement(workers, {"half": "50%-"}, nodes=places)
    return plan(Flow("growing", (), nodes), made, Workload(prompts=64 * workers))


def run_growing(rank: int, workers: int) -> list[Traffic]:
    return run_worker(rank, growing_plan(workers), 2)[1]


def test_no_worker_carries_more_when_there_are_more_workers() -> None:
    busiest = {}
    for n in (2, 4, 8):
        of_all = spawn(n, run_growing, n)
        busiest[n] = [max(max(getattr(t, way) for t in steps) for steps in of_all) for way in ("sent", "received")]
    for n in (4, 8):
        for few, many in zip(busiest[2], busiest[n], strict=True):
            assert many < 1.15 * few, busiest


def run_dealing(rank: int, shared_memory: str) -> None:
    os.environ[SHARED_MEMORY] = shared_memory
    everybody, size = (0, 1, 2), 1 << 16
    comm = Transport([everybody], torch.device("cpu"), lambda _: nullcontext())
    for turn in range(8):
        takers = everybody if turn % 2 else (2,)  # who only gives does not wait for who takes
        send = [size if r in takers else 0 for r in everybody]
        out = torch.empty(3 * size if rank in takers else 0, dtype=torch.uint8)
        if rank == 2:
            time.sleep(0.05)  # late for all of them
        mine = 16 * rank + turn
        receive = [size if rank in takers else 0] * 3
        comm.perform(AllToAll(everybody, lambda data, mine=mine: data.fill_(mine), send, out, receive))  # type: ignore[misc]
        for giver, piece in enumerate(out.split(size)):
            assert (piece == 16 * giver + turn).all(), (turn, giver)


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_what_is_dealt_stays_until_the_slowest_has_read_it(shared_memory: str) -> None:
    spawn(3, run_dealing, shared_memory)


def write_differently(batch: Batch, ctx: Any) -> Any:
    return [1.0] * len(batch) if ctx.rank else torch.ones(len(batch))


def run_disagreeing(rank: int) -> str:
    nodes = (Node("score", writes=("score",), fn=write_differently), Node("use", reads=("score",), fn=read_tokens))
    made = plan(Flow("f", (), nodes), Placement(2, nodes={"use": Place(tp=2)}), Workload(4))
    with pytest.raises(Exception, match="write the same type everywhere") as e:
        run_worker(rank, made, 1)
    return str(e.value)


def test_workers_that_write_different_types_are_told_the_field() -> None:
    assert "field 'score' is" in spawn(2, run_disagreeing)[0]


def run_metrics(rank: int) -> list[dict[str, float]]:
    reduced: list[dict[str, float]] = []
    reducer = MetricsReducer(torch.distributed.new_group(), lambda _, numbers: reduced.append(numbers))
    for step in range(3):
        metrics = StepMetrics()
        metrics.log("reward/mean", value=float(rank), count=rank + 1)
        metrics.log("length/max", 10.0 * rank, reduce="max")
        metrics.log("length/min", 10.0 * rank, reduce="min")
        metrics.log("tokens", 5, reduce="sum")
        if rank == 1 and step == 1:  # a metric that one worker has, once
            metrics.log("rare/thing", 7.0)
        reducer.submit(step, metrics)
    reducer.wait(0)
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
    sets = [(0, 1, 2), (0, 2)]
    comm = Transport(sets, torch.device("cpu"), lambda _: nullcontext())
    run_random_graphs(rank, 3, seeds, "1")
    return [ranks in comm._neighbours for ranks in sets]


def test_where_memory_cannot_be_shared_sockets_do() -> None:
    assert spawn(3, run_without_memfd, range(3)) == [[False, True], [False, False], [False, True]]
