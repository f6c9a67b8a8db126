"""The delay of the edge that carries weights from step to step is a property of the plan."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from distflow.errors import PlacementError
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Resample, RunNode, SyncWeights, Workload, plan
from distflow.plan.staleness import weight_version, weights_after
from distflow.plan.svg import svg
from distflow.plan.table import render

GENERATE = Node("generate", "actor", "inference", ("prompt",), ("tokens",), generates=True, method=True)
SCORE = Node("score", reads=("tokens",), writes=("score",))
KEEP = Node("keep", reads=("tokens",), writes=("keep",), dynamic_sampling=2)
UPDATE = Node("update", "actor", "train", ("tokens", "score"), method=True)
SPLIT = {"generate": Place("rollout"), "score": Place("train"), "update": Place("train")}


def planned(
    *nodes: Node,
    staleness: int = 2,
    places: dict[str, Place] = SPLIT,
    chunk: int | None = None,
    prompts: int = 4,
    ahead: int = 0,
) -> Plan:
    rank_sets = {"rollout": "0-1", "train": "2-3"}
    placement = Placement(
        4, rank_sets, nodes={k: v for k, v in places.items() if k in {n.id for n in nodes} | {"data"}}
    )
    flow, work = Flow("loop", ("prompt",), nodes), Workload(prompts)
    return plan(flow, placement, work, staleness=staleness, chunk=chunk, prompts_ahead=ahead)


def test_step_k_generates_with_the_weights_of_step_k_minus_d_and_never_with_older_ones_than_the_first() -> None:
    assert [weight_version(step, 2, 0) for step in range(1, 7)] == [0, 0, 0, 1, 2, 3]
    assert [weight_version(step, 0, 0) for step in range(1, 4)] == [0, 1, 2]
    assert [weight_version(step, 2, 5) for step in range(6, 11)] == [5, 5, 5, 6, 7]


def test_it_is_in_the_plan_its_hash_its_table_and_its_drawing() -> None:
    fresh, stale = (planned(GENERATE, SCORE, UPDATE, staleness=d) for d in (0, 2))
    assert fresh.hash != stale.hash
    assert (fresh.staleness, stale.staleness) == (0, 2)
    assert stale.ahead == {0, 1}
    assert [t.delay for t in stale.tasks if isinstance(t, SyncWeights)] == [2]
    assert stale.to_json()["staleness"] == 2
    console = Console(width=200, record=True)
    console.print(render(stale))
    text = console.export_text()
    assert "while train 2-3 run step k, rollout 0-1 generate as far as step k+2" in text
    assert "actor weights of step k−2" in text
    assert "step k … k+2" in svg(stale)
    assert "k+2" not in svg(fresh)


@pytest.mark.parametrize(
    ("nodes", "places", "message"),
    [
        ((Node("score", reads=("prompt",)),), SPLIT, "the flow 'loop' has no node that generates with"),
        ((GENERATE, SCORE), SPLIT, "the flow 'loop' has no node that generates with weights that another one trains"),
        ((GENERATE, SCORE, UPDATE), SPLIT | {"update": Place()}, "'generate' and 'update' share ranks 0-1"),
        (
            (GENERATE, KEEP, Node("update", "actor", "train", ("tokens",), method=True)),
            SPLIT | {"keep": Place("train")},
            "'keep' runs on ranks 2-3, which train, and every round of 'keep' needs it; place it on ranks that do not",
        ),
        (
            (GENERATE, replace(SCORE, reads=("prompt",)), KEEP, UPDATE),
            SPLIT | {"keep": Place("rollout"), "score": Place("rollout"), "data": Place("train")},
            "'data' runs on ranks 2-3, which train",
        ),
    ],
)  # fmt: skip
def test_where_nobody_can_run_ahead_it_is_refused(nodes: Any, places: Any, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        planned(*nodes, places=places)
    planned(*nodes, places=places, staleness=0)


def test_dynamic_sampling_may_be_ahead_of_training_but_has_no_chunks_and_begins_nothing_early() -> None:
    places = SPLIT | {"keep": Place("rollout"), "score": Place("rollout")}
    nodes = (GENERATE, SCORE, KEEP, UPDATE)
    p = planned(*nodes, places=places)
    (resample,) = (i for i, t in enumerate(p.tasks) if isinstance(t, Resample))
    after = weights_after(p)
    assert after is not None
    assert after > resample
    for key, option in (("rollout.chunk", {"chunk": 2}), ("rollout.partial", {"ahead": 2})):
        with pytest.raises(PlacementError, match=f"{key}: 'keep' samples dynamically, and how many rounds"):
            planned(*nodes, places=places, **option)


def test_nodes_that_work_sample_by_sample_on_other_ranks_run_chunk_by_chunk() -> None:
    p = planned(GENERATE, SCORE, UPDATE, chunk=2, staleness=0)
    assert p.chunks == 2
    runs = [
        t.name + (f" {t.partition.chunk[0]}" if t.partition.chunk else "") for t in p.tasks if isinstance(t, RunNode)
    ]
    assert runs == ["generate", "score 0", "score 1", "update"]
    assert p.hash != planned(GENERATE, SCORE, UPDATE, staleness=0).hash
    console = Console(width=200, record=True)
    console.print(render(p))
    assert "2 chunks per step: score run chunk by chunk" in console.export_text()
    assert svg(p).count('class="move"') > 1
    whole = replace(SCORE, whole_batch=True)
    for nodes, places in (
        ((GENERATE, whole, UPDATE), SPLIT),
        ((GENERATE, SCORE, UPDATE), SPLIT | {"score": Place("rollout")}),
    ):
        with pytest.raises(PlacementError, match=r"rollout\.chunk: no node runs chunk by chunk"):
            planned(*nodes, places=places, chunk=2)


def test_a_chunk_that_does_not_divide_is_refused() -> None:
    for chunk, prompts, way_out in ((3, 8, "use one of 2, 4, 8"), (1, 8, "use one of 2"), (2, 7, "a multiple of 2")):
        with pytest.raises(PlacementError, match=f"rollout.chunk: chunks of {chunk} do not divide .*{way_out}"):
            planned(GENERATE, SCORE, UPDATE, chunk=chunk, prompts=prompts)
    with pytest.raises(PlacementError, match=r"rollout\.chunk: 'generate' and 'update' share ranks"):
        planned(GENERATE, SCORE, UPDATE, places=SPLIT | {"update": Place()}, staleness=0, chunk=2)


def test_prompts_of_later_steps_that_may_be_begun_are_in_the_plan_and_its_hash() -> None:
    p = planned(GENERATE, SCORE, UPDATE, ahead=3)
    assert p.prompts_ahead == p.to_json()["prompts_ahead"] == 3
    assert p.hash != planned(GENERATE, SCORE, UPDATE).hash
    console = Console(width=200, record=True)
    console.print(render(p))
    assert "while the responses of a step are generated, 3 prompts of later steps may begin" in console.export_text()


@pytest.mark.parametrize(
    ("nodes", "places", "staleness", "message"),
    [
        ((GENERATE, SCORE, UPDATE), SPLIT, 0, "tokens of older weights, and rollout.staleness is 0; make it 1 or more"),
        ((GENERATE, SCORE, UPDATE), SPLIT | {"update": Place()}, 1, "'generate' and 'update' share ranks 0-1"),
        ((GENERATE, SCORE), SPLIT, 1, "the flow 'loop' has no node that generates"),
        (
            (GENERATE, SCORE, UPDATE),
            SPLIT | {"data": Place("train")},
            1,
            "'generate' runs on ranks 0-1, and its prompts are loaded on 2-3, so it cannot begin prompts of later",
        ),
        (
            (
                Node("rewrite", reads=("prompt",), writes=("question",)),
                replace(GENERATE, reads=("question",)),
                SCORE,
                UPDATE,
            ),
            SPLIT | {"rewrite": Place("rollout")},
            1,
            "'generate' reads 'question', which 'rewrite' writes, so it cannot begin prompts of later steps",
        ),
        (
            (GENERATE, replace(GENERATE, id="again", writes=("more",)), SCORE, UPDATE),
            SPLIT | {"again": Place("rollout")},
            1,
            "'generate' and 'again' both generate; leave it out",
        ),
    ],
)
def test_where_responses_cannot_be_carried_on_it_is_refused(
    nodes: Any, places: Any, staleness: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=rf"^rollout\.partial: .*{message}"):
        planned(*nodes, places=places, staleness=staleness, ahead=4)
    planned(*nodes, places=places, staleness=0)
