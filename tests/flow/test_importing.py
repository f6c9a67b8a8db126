"""What a call inside a flow says of its node: `prefix` and `refill`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distflow import Batch, Context
from distflow.data.coordinator import Coordinator
from distflow.data.loader import Loader
from distflow.errors import FlowError
from distflow.flow import Flow, flow, from_list, node
from distflow.observe.metrics import StepMetrics
from distflow.plan import Placement, Workload, plan
from distflow.run.worker import Worker
from simulate import simulate


@node(writes=("said", "length"))
def say(batch: Batch, loud: bool = False) -> dict[str, Any]:
    said = [t.upper() if loud else t for t in batch["text"]]
    return {"said": said, "length": torch.tensor([len(t) for t in said])}


@node(writes="score")
def judge(batch: Batch, ctx: Context) -> Any:
    score = torch.tensor([float(t.isupper()) for t in batch["said"]])
    ctx.metrics.log("score/mean", float(score.mean()), len(batch))
    return score


@node
def compare(batch: Batch) -> Any:
    return batch["loud_score"] - batch["score"]


@node(writes=(), reads=("compare", "said", "loud_said"))
def look(batch: Batch) -> None:
    assert batch["compare"].tolist() == [1.0] * len(batch)
    assert [t.upper() for t in batch["said"]] == batch["loud_said"]


@flow
def twice(data):
    quiet = say(data)
    loud = say(data, loud=True, prefix="loud_")
    difference = compare(judge(quiet["said"]), judge(loud["loud_said"], prefix="loud_"))
    look(difference, quiet, loud)


class Texts:
    names: tuple[str, ...] = ("text",)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": "abcd"[i] * (i + 1)}


def run(made: Flow, steps: int = 1, prompts: int = 2) -> list[StepMetrics]:
    planned = plan(made, Placement(2), Workload(prompts, 2))
    tallies: list[StepMetrics] = []
    workers = {}
    for rank in range(2):
        data = Coordinator(rank, planned, Loader(Texts(), prompts, 2, seed=0))
        worker = Worker(rank, planned, data, {}, 7, Path(), lambda *_: None)
        workers[rank] = worker.steps(0, steps, lambda _, metrics: tallies.append(metrics))
    simulate(workers)
    return tallies


def test_a_node_used_twice_writes_under_a_prefix_and_its_metrics_too() -> None:
    made = twice.trace(("text",))
    assert made.node("say_2").writes == ("loud_said", "loud_length")
    assert made.node("judge_2").reads == ("loud_said",)
    totals = run(made)[0].totals
    assert totals["loud_score/mean", "mean"] == (2.0, 2.0)
    assert totals["score/mean", "mean"] == (0.0, 2.0)


def test_a_list_says_the_same_as_a_function() -> None:
    here = Path(__file__)
    entries: list[dict[str, Any]] = [
        {"id": "say", "call": f"{here}:say", "deps": "data"},
        {"id": "say_2", "call": f"{here}:say", "deps": "data", "params": {"loud": True}, "prefix": "loud_"},
        {"id": "judge", "call": f"{here}:judge", "reads": "said"},
        {"id": "judge_2", "call": f"{here}:judge", "reads": "loud_said", "prefix": "loud_"},
        {"id": "compare", "call": f"{here}:compare", "deps": ["judge", "judge_2"]},
        {"id": "look", "call": f"{here}:look", "deps": ["compare", "say", "say_2"]},
    ]
    listed = from_list("twice", ("text",), entries)
    traced = twice.trace(("text",))
    assert [(n.id, n.reads, n.writes, n.prefix) for n in listed.nodes] == [
        (n.id, n.reads, n.writes, n.prefix) for n in traced.nodes
    ]


def test_what_its_prefix_makes_one_is_read_once() -> None:
    @flow
    def muddle(data):
        quiet, loud = say(data), say(data, prefix="loud_")
        judge(quiet["said"], loud["loud_said"], prefix="loud_")

    with pytest.raises(FlowError, match="node 'judge': reads 'said' and 'loud_said', which its prefix makes one"):
        muddle.trace(("text",))


@node
def short(batch: Batch) -> Any:
    return batch["length"] < 3


@node(whole_groups=True, writes=())
def only_short(batch: Batch, ctx: Context) -> None:
    assert all(len(t) < 3 for t in batch["said"])
    ctx.metrics.log("groups", sum(ctx.groups), reduce="max")


def test_refused_prompts_are_replaced_before_anything_else_runs() -> None:
    @flow
    def picky(data):
        said = say(data)
        only_short(said, after=short(said["length"], refill=8))

    totals = [t.totals for t in run(picky.trace(("text",)), steps=3)]
    assert len(totals) == 6
    assert all(t["sampling/filled", "mean"][0] == 0 for t in totals)
    assert sum(t["sampling/discarded", "mean"][0] for t in totals[::2]) > 0


def test_a_refill_is_refused_where_it_makes_no_sense() -> None:
    @node(type="train", writes=("loss",))
    def train(batch: Batch) -> Any:
        return batch["length"]

    @flow
    def late(data):
        short(train(say(data)), say(data, prefix="x_"), refill=2)

    with pytest.raises(FlowError, match="node 'train': trains, and 'short', which refills the batch, comes after it"):
        late.trace(("text",))

    @flow
    def double(data):
        said = say(data)
        short(said, refill=2)
        short(said, refill=2)

    with pytest.raises(FlowError, match="'short' and 'short_2' both refill the batch; one node can"):
        double.trace(("text",))

    @flow
    def wide(data):
        say(data, refill=2)

    with pytest.raises(FlowError, match="node 'say': refills the batch, so it writes one field"):
        wide.trace(("text",))
