"""Arguments of a call inside a flow that are for its node: `prefix` and `dynamic_sampling`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from distflow import Batch, Context
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.errors import FlowError
from distflow.flow import Flow, flow, from_list, node
from distflow.observe.metrics import StepMetrics
from distflow.plan import Placement, Workload, plan
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from simulate import simulate


@node(writes=("reply", "length"))
def answer(batch: Batch, loud: bool = False) -> dict[str, Any]:
    replies = [t.upper() if loud else t for t in batch["text"]]
    return {"reply": replies, "length": torch.tensor([len(t) for t in replies])}


@node(writes="score")
def judge(batch: Batch, ctx: Context) -> Any:
    score = torch.tensor([float(t.isupper()) for t in batch["reply"]])
    ctx.metrics.log("score/mean", float(score.mean()), len(batch))
    return score


@node
def compare(batch: Batch) -> Any:
    return batch["loud_score"] - batch["score"]


@node(writes=(), reads=("compare", "reply", "loud_reply"))
def look(batch: Batch) -> None:
    assert batch["compare"].tolist() == [1.0] * len(batch)
    assert [t.upper() for t in batch["reply"]] == batch["loud_reply"]


@flow
def twice(data):
    quiet = answer(data)
    loud = answer(data, loud=True, prefix="loud_")
    difference = compare(judge(quiet["reply"]), judge(loud["loud_reply"], prefix="loud_"))
    look(difference, quiet, loud)


class Texts:
    column_names: tuple[str, ...] = ("text",)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": "abcd"[i] * (i + 1)}


def run(flow: Flow, steps: int = 1, prompts: int = 2) -> list[StepMetrics]:
    planned = plan(flow, Placement(2), Workload(prompts, 2))
    tallies: list[StepMetrics] = []
    workers = {}
    for rank in range(2):
        data = Coordinator(rank, planned, Loader(Texts(), prompts, 2, seed=0))
        worker = Worker(data, Comm(rank, planned, {}, Versions(last=steps)))
        workers[rank] = worker.steps(lambda _, metrics: tallies.append(metrics))
    simulate(workers)
    return tallies


def test_a_node_used_twice_writes_under_a_prefix_and_its_metrics_too() -> None:
    graph = twice.trace(("text",))
    assert graph.node("answer_2").writes == ("loud_reply", "loud_length")
    assert graph.node("judge_2").reads == ("loud_reply",)
    totals = run(graph)[0].totals
    assert totals["loud_score/mean", "mean"] == (2.0, 2.0)
    assert totals["score/mean", "mean"] == (0.0, 2.0)


def test_a_list_gives_the_same_graph_as_a_function() -> None:
    here = Path(__file__)
    entries: list[dict[str, Any]] = [
        {"id": "answer", "call": f"{here}:answer", "deps": "data"},
        {"id": "answer_2", "call": f"{here}:answer", "deps": "data", "params": {"loud": True}, "prefix": "loud_"},
        {"id": "judge", "call": f"{here}:judge", "reads": "reply"},
        {"id": "judge_2", "call": f"{here}:judge", "reads": "loud_reply", "prefix": "loud_"},
        {"id": "compare", "call": f"{here}:compare", "deps": ["judge", "judge_2"]},
        {"id": "look", "call": f"{here}:look", "deps": ["compare", "answer", "answer_2"]},
    ]
    listed = from_list("twice", ("text",), entries)
    traced = twice.trace(("text",))
    assert [(n.id, n.reads, n.writes, n.prefix) for n in listed.nodes] == [
        (n.id, n.reads, n.writes, n.prefix) for n in traced.nodes
    ]


def test_two_fields_that_are_the_same_without_the_prefix_are_refused() -> None:
    @flow
    def ambiguous(data):
        quiet, loud = answer(data), answer(data, prefix="loud_")
        judge(quiet["reply"], loud["loud_reply"], prefix="loud_")

    with pytest.raises(FlowError, match="node 'judge': reads 'reply' and 'loud_reply', which are the same without its"):
        ambiguous.trace(("text",))


@node
def short(batch: Batch) -> Any:
    return batch["length"] < 3


@node(whole_groups=True, writes=())
def only_short(batch: Batch, ctx: Context) -> None:
    assert all(len(t) < 3 for t in batch["reply"])
    ctx.metrics.log("groups", sum(ctx.groups), reduce="max")


def test_rejected_prompts_are_replaced_before_other_nodes_run() -> None:
    @flow
    def picky(data):
        replies = answer(data)
        only_short(replies, after=short(replies["length"], dynamic_sampling=8))

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
        short(train(answer(data)), answer(data, prefix="x_"), dynamic_sampling=2)

    with pytest.raises(
        FlowError, match="node 'train': trains before 'short', which samples dynamically; train after it"
    ):
        late.trace(("text",))

    @flow
    def double(data):
        replies = answer(data)
        short(replies, dynamic_sampling=2)
        short(replies, dynamic_sampling=2)

    with pytest.raises(FlowError, match="'short' and 'short_2' both sample dynamically; only one node can"):
        double.trace(("text",))

    @flow
    def wide(data):
        answer(data, dynamic_sampling=2)

    with pytest.raises(FlowError, match="node 'answer': samples dynamically, so it must write one field"):
        wide.trace(("text",))


def test_an_argument_that_was_renamed_is_refused_with_its_new_name() -> None:
    @flow
    def old(data: Any) -> None:
        short(answer(data), refill=2)

    with pytest.raises(FlowError, match="no parameter 'refill'; it is called 'dynamic_sampling' now"):
        old.trace(("text",))
    with pytest.raises(FlowError, match="@node has no option 'hand_over'; it is called 'generates' now"):
        node(hand_over=True)
