"""Promise: control costs a worker O(log N). Messages of the workers' own code, N of them in one process."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from distflow.batch.batch import Batch, Ragged
from distflow.comm.collectives import Communication
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.observe.metrics import MetricsReducer, StepMetrics
from distflow.plan import Free, Move, Place, Placement, Plan, RunNode, Workload
from distflow.plan import plan as make_plan
from simulate import Traffic, simulate

PER_WORKER, REPEAT = 4, 4


class NoRows:
    column_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {}


def step_plan(workers: int, split: bool) -> Plan:
    """A step of GRPO: all ranks generate with tp 2 and train, balanced; or even ones generate, odd ones train."""
    nodes = (
        Node("generate", writes=("tokens",)),
        Node("old", reads=("tokens",), writes=("old_logprobs",), balance="tokens"),
        Node("score", reads=("tokens",), writes=("score",)),
        Node("update", reads=("tokens", "old_logprobs", "score"), balance="tokens"),
    )
    sets = {name: ",".join(map(str, range(i, workers, 2))) for i, name in enumerate(("even", "odd"))}
    places = {"generate": Place(tp=2)}
    if split:
        places = {n: Place("odd" if n in ("old", "update") else "even") for n in ("generate", "old", "score", "update")}
    prompts = PER_WORKER * workers // REPEAT
    return make_plan(Flow("step", (), nodes), Placement(workers, sets, nodes=places), Workload(prompts, REPEAT))


def rows(batch: Batch) -> Ragged:
    lengths = 1 + batch.ids * 7919 % 13
    return Ragged.packed(torch.zeros(int(lengths.sum()), dtype=torch.uint8), lengths)


def walk(data: Coordinator, traffic: Traffic, sent: dict[str, list[tuple[int, int]]]) -> Communication[None]:
    """Runs the data tasks of a chain; nodes write a few bytes. Adds messages and bytes to `sent`, by task."""
    rank, reducer, metrics = data.rank, MetricsReducer(data.rank, range(data.plan.workers), None), StepMetrics()
    metrics.log("loss", 1.0)

    def count(what: str, communication: Communication[Any]) -> Communication[None]:
        before = traffic.messages[rank], traffic.bytes[rank]
        yield from communication
        sent.setdefault(what, []).append((traffic.messages[rank] - before[0], traffic.bytes[rank] - before[1]))

    for task in data.plan.chain(rank):
        match task:
            case Move():
                yield from count(task.id, data.move(1, task))
            case RunNode():
                data.outputs(1, task, dict.fromkeys(task.writes, rows(data.inputs(1, task))))
            case Free():
                data.free(1, task)
    data.end_step(1)
    yield from reducer.reduce(0, metrics)  # agrees on the names, once
    yield from count("metrics", reducer.reduce(1, metrics))
    reducer.close()


@cache
def most_sent(workers: int, split: bool) -> dict[str, tuple[int, int]]:
    """Returns the messages and the bytes that the busiest rank sends in each move, and for the metrics."""
    plan, traffic = step_plan(workers, split), Traffic()
    sent: dict[str, list[tuple[int, int]]] = {}
    all_data = [Coordinator(r, plan, Loader(NoRows(), plan.samples // REPEAT, REPEAT, seed=0)) for r in range(workers)]
    simulate({data.rank: walk(data, traffic, sent) for data in all_data}, traffic)
    for data in all_data:
        data.close()
    return {what: (max(n for n, _ in counts), max(size for _, size in counts)) for what, counts in sent.items()}


@pytest.mark.parametrize("split", [False, True])
def test_no_rank_sends_more_than_some_times_log_n_messages_in_a_move(split: bool) -> None:
    for workers in (64, 1024):
        most = most_sent(workers, split)
        assert set(most) >= {"m0", "m1", "metrics"}
        for what, (messages, _) in most.items():
            assert messages <= 3 * math.log2(workers), (workers, what, most)


@pytest.mark.parametrize("split", [False, True])
def test_a_rank_sends_as_many_bytes_however_many_there_are(split: bool) -> None:
    """Metadata included: beyond the size of a domain it does not grow."""
    few, many = most_sent(128, split), most_sent(1024, split)
    assert all(many[what][1] < 1.3 * few[what][1] + 200 for what in few), (few, many)
