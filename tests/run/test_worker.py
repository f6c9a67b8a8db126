"""What a worker guarantees to the functions it calls, in one process."""

import re
from typing import Any

import pytest
import torch

from distflow import Batch, Context
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.loader import Loader
from distflow.errors import NodeError
from distflow.flow import Flow, Node
from distflow.observe.metrics import StepMetrics
from distflow.plan import Placement, Workload, plan
from distflow.roles.role import Role
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Surroundings, Worker
from simulate import simulate


class Prompts:
    column_names: tuple[str, ...] = ("prompt",)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"row {i}"}]}


def run(*nodes: Node, steps: int = 2, repeat: int = 2) -> tuple[list[StepMetrics], Coordinator]:
    test_plan = plan(Flow("test", Prompts.column_names, nodes), Placement(1), Workload(2, repeat))
    all_metrics: list[StepMetrics] = []
    data = Coordinator(0, test_plan, Loader(Prompts(), 2, repeat, seed=0))
    worker = Worker(data, Comm(0, test_plan, {}, Versions(last=steps)), Surroundings(seed=7))
    simulate({0: worker.steps(lambda _, metrics: all_metrics.append(metrics))})
    return all_metrics, data


def write(batch: Batch) -> dict[str, Any]:
    return {"tokens": torch.arange(len(batch)), "rows": [torch.ones(2), *[torch.ones(1)] * (len(batch) - 1)]}


WRITE = Node("write", reads=("prompt",), writes=("tokens", "rows"), fn=write)


def test_a_node_that_changes_a_tensor_in_place_is_stopped() -> None:
    def spoil_dense(batch: Batch) -> None:
        batch["tokens"].add_(1)

    def spoil_ragged(batch: Batch) -> None:
        batch["rows"][0].zero_()

    for fn, field in ((spoil_dense, "tokens"), (spoil_ragged, "rows")):
        with pytest.raises(NodeError, match=f"rank 0, step 1, node 'spoil': changed field '{field}' in place"):
            run(WRITE, Node("spoil", reads=("tokens", "rows"), fn=fn))


def test_a_node_may_change_objects_without_anybody_noticing() -> None:
    def scribble(batch: Batch) -> None:
        for messages in batch["prompt"]:
            messages.append("scribble")
            messages[0]["content"] = "gone"

    def check(batch: Batch) -> None:
        for messages in batch["prompt"]:
            assert len(messages) == 1
            assert re.fullmatch(r"row \d", messages[0]["content"])

    run(Node("scribble", reads=("prompt",), fn=scribble), Node("check", reads=("prompt",), fn=check))


def test_a_list_of_floats_is_a_tensor_to_its_readers() -> None:
    written = {"floats": [0.5, 1.0, 0.25, 0.0], "mixed": [1, 0.5, 0, 1], "whole": [1, 2, 3, 4], "some": [None, 0.5] * 2}

    def look(batch: Batch) -> None:
        for field in ("floats", "mixed"):
            assert batch[field].dtype is torch.float32
            assert batch[field].tolist() == written[field]
        assert (batch["whole"], batch["some"]) == (written["whole"], written["some"])

    write = Node("write", reads=("prompt",), writes=tuple(written), fn=lambda batch: written)
    run(write, Node("look", reads=tuple(written), fn=look))


def test_the_context_has_step_rank_and_layout() -> None:
    contexts: list[Context] = []

    def look(batch: Batch, ctx: Context, more: int) -> None:
        assert more == 3
        contexts.append(ctx)

    run(Node("look", reads=("prompt",), params={"more": 3}, fn=look))
    assert [(c.step, c.rank, c.workers, c.layout.dp, c.seed) for c in contexts] == [(1, 0, 1, 1, 7), (2, 0, 1, 1, 7)]


def test_every_field_is_gone_when_its_step_is_over() -> None:
    _, data = run(WRITE, Node("use", reads=("tokens", "rows"), fn=lambda batch: None))
    assert not data.buffer._columns
    assert not data._steps
    assert not data._moved


def test_what_a_node_returns_is_checked_against_what_it_declares() -> None:
    for result, message in (
        ({"tokenz": [1, 2, 3, 4]}, "returned field 'tokenz', which it does not declare; did you mean 'tokens'"),
        (None, "returned no field 'tokens', which 'use' reads"),
        ([1, 2, 3, 4], "returned a list; return a dict of the fields tokens, rows"),
        ({"tokens": [1], "rows": [1]}, "field 'tokens': has 1 values for 4 samples"),
    ):
        bad = Node("write", reads=("prompt",), writes=("tokens", "rows"), fn=lambda batch, r=result: r)
        with pytest.raises(NodeError, match=re.escape(message)):
            run(bad, Node("use", reads=("tokens",), fn=lambda batch: None))


def test_timings_and_traffic_of_every_step_are_logged() -> None:
    all_metrics, _ = run(WRITE, Node("use", reads=("tokens", "rows"), fn=lambda batch: None))
    assert len(all_metrics) == 2
    for metrics in all_metrics:
        names = {name for name, _ in metrics.totals}
        assert {"timing_s/load", "timing_s/write", "timing_s/use", "timing_s/step"} <= names
        assert metrics.totals["data/bytes_local", "mean"][0] >= 4 * 8 + 5 * 4  # tokens and rows, passed on locally
        assert metrics.totals["data/bytes_sent", "mean"][0] == 0


def test_on_a_worker_without_samples_functions_are_not_called_but_methods_are() -> None:
    called: list[tuple[str, int, int]] = []  # node, rank, samples

    def function(batch: Batch, ctx: Context) -> Any:
        called.append(("function", ctx.rank, len(batch)))
        return batch.ids.max() - batch.ids  # raises without samples

    def method(role: Role, batch: Batch, ctx: Context) -> None:
        called.append(("judge", ctx.rank, len(batch["value"])))
        ctx.metrics.log("mean", float("nan") if not len(batch) else 1.0, len(batch))

    nodes = (
        Node("function", reads=("prompt",), writes=("value",), fn=function),
        Node("method", role="judge", reads=("value",), fn=method, method=True),
    )
    test_plan = plan(Flow("test", Prompts.column_names, nodes), Placement(3), Workload(2))
    means: list[Any] = []
    workers = {}
    for rank in range(3):
        data = Coordinator(rank, test_plan, Loader(Prompts(), 2, 1, seed=0))
        worker = Worker(data, Comm(rank, test_plan, {"judge": Role()}, Versions(last=1)))
        workers[rank] = worker.steps(lambda _, metrics: means.append(metrics.totals.get(("mean", "mean"))))
    simulate(workers)
    assert sorted(called) == [("function", 0, 1), ("function", 1, 1), *(("judge", r, int(r < 2)) for r in range(3))]
    assert means == [(1.0, 1), (1.0, 1), None]
