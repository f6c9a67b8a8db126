"""Every rank joins its communicators in an order in which nobody waits for ever, whatever the placement."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.config.schema import Config
from distflow.plan import Layout, SyncWeights
from distflow.plan.communicators import WEIGHT_SYNC, Communicator, MeshShape, communicators
from distflow.run.program import Program
from distflow.run.role_objects import mesh_shapes

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = '{"prompt": "one", "answer": "1", "chosen": "a", "rejected": "b"}\n'


def joins(order: Sequence[Communicator]) -> dict[int, list[Communicator]]:
    """Returns what each rank joins, one after the other."""
    by_rank: dict[int, list[Communicator]] = {}
    for communicator in order:
        for rank in communicator.ranks:
            by_rank.setdefault(rank, []).append(communicator)
    return by_rank


def stuck(by_rank: Mapping[int, Sequence[Communicator]]) -> set[int]:
    """Joins communicators once all of their members have come to them; returns the ranks that wait for ever."""
    rest = {rank: list(reversed(own)) for rank, own in by_rank.items()}
    ready = [own[-1] for own in rest.values() if own]
    while ready:
        communicator = ready.pop()
        members = [rest.get(rank, []) for rank in communicator.ranks]
        if all(own and own[-1] == communicator for own in members):
            for own in members:
                own.pop()
            ready += dict.fromkeys(own[-1] for own in members if own)
    return {rank for rank, own in rest.items() if own}


def check(program: Program, workers: int) -> list[Communicator]:
    """Checks all ranks of a run; returns their communicators."""
    plans = [program.plan(workers)]
    shapes = mesh_shapes(program, plans)
    order = communicators(shapes, plans)
    by_rank = joins(order)
    assert len(set(order)) == len(order), "two communicators have one name and the same ranks"
    assert not stuck(by_rank)
    for shape in shapes:  # each rank finds its own communicator of every dimension
        found = Counter(rank for c in shape.communicators() for rank in c.ranks)
        assert found == dict.fromkeys(shape.layout.ranks, len(shape.dims))
    moved = [t for t in plans[0].tasks if isinstance(t, SyncWeights) and len(t.ranks) > 1]
    assert all(Communicator(WEIGHT_SYNC, order[-1].ranks) == order[-1] for _ in moved)
    assert all(set(t.ranks) <= set(order[-1].ranks) for t in moved)
    return order


def program(folder: Path, **sections: object) -> Program:
    (folder / "rows.jsonl").write_text(ROW * 8)
    (folder / "reward.py").write_text("def score(solution_str):\n    return 0.0\n")
    config = {
        "name": "run",
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "rows.jsonl", "batch": 8192},
        "reward": "reward.py:score",
        "run_dir": str(folder / "run"),
    }
    return Program(Config.model_validate(config | sections | {"base": folder}))


PLACED = {
    "colocated": {},
    "generation with another tp": {"nodes": {"actor.generate": {"tp": 4}}},
    "split": {
        "ranks": {"a": "0%-50%", "b": "50%-"},
        "default": {"ranks": "b"},
        "nodes": {"actor.generate": {"ranks": "a", "tp": 2}},
    },
    "a reward apart": {
        "ranks": {"a": "0-3", "b": "4-6", "c": "7"},
        "default": {"ranks": "b"},
        "roles": {"reward": {"ranks": "c"}},
        "nodes": {"actor.generate": {"ranks": "a"}},
    },
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("workers", [8, 64, 1024])
@pytest.mark.parametrize("shard", [None, 2])
def test_placements(name: str, workers: int, shard: int | None, tmp_path: Path) -> None:
    if shard and name == "a reward apart":
        shard = 3
    order = check(program(tmp_path, placement=PLACED[name], train={"shard_degree": shard}), workers)
    assert order[-1].name == WEIGHT_SYNC


def placed_examples() -> list[Path]:
    contents = {path: yaml.safe_load(path.read_text()) for path in sorted(EXAMPLES.glob("*/*.yaml"))}
    return [p for p, c in contents.items() if isinstance(c, dict) and "placement" in c and "flow" in c]


@pytest.mark.parametrize("path", placed_examples(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_examples(path: Path) -> None:
    program = Program.load(path)
    check(program, program.config.workers or 4)


@st.composite
def shapes(draw: st.DrawFn) -> list[MeshShape]:
    """Layouts over random rank sets of 8 to 1,024 ranks, some with hybrid sharding."""
    workers = draw(st.sampled_from([8, 24, 64, 128, 1024]))
    found: list[MeshShape] = []
    for _ in range(draw(st.integers(1, 5))):
        tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, workers // 8))
        shuffled = list(range(workers))
        random.Random(draw(st.integers(0, 99))).shuffle(shuffled)
        layout = Layout(tuple(shuffled[: dp * tp]), dp, tp)
        shards = [n for n in (2, 4, 8) if dp % n == 0 and n != dp]
        found += [MeshShape(layout), *(MeshShape(layout, n) for n in shards if draw(st.booleans()))]
    return list(dict.fromkeys(found))


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_random_layouts(found: list[MeshShape]) -> None:
    assert not stuck(joins(communicators(found, [])))


LAYOUTS = [MeshShape(Layout(tuple(range(8)), 4, 2)), MeshShape(Layout((2, 3, 0, 1), 2, 2))]


def test_a_rank_that_misses_is_found() -> None:
    for rank in range(8):
        by_rank = joins(communicators(LAYOUTS, []))
        by_rank[rank].pop()
        assert stuck(by_rank)


def test_a_rank_that_joins_in_another_order_is_found() -> None:
    by_rank = joins(communicators(LAYOUTS, []))
    by_rank[1][1], by_rank[1][3] = by_rank[1][3], by_rank[1][1]  # of the same two ranks
    assert {0, 1} <= stuck(by_rank)
