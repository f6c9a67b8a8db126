"""The demo's data, reward and configs; it is too long to be run here."""

import json
from pathlib import Path

import pytest

from distflow.flow.importing import load
from distflow.run.program import Program

HERE = Path(__file__).parents[2] / "examples" / "sorting"
PARTS = ("held_out", "train", "warmup")


def rows(folder: Path, part: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sorting")
    load("data.py:write", "test", HERE)(made)
    return made


def test_data_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    load("data.py:write", "test", HERE)(tmp_path)
    for part in PARTS:
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (folder / f"{part}.jsonl").read_bytes()


def test_held_out_prompts_are_never_trained_on(folder: Path) -> None:
    seen = {part: [row["prompt"] for row in rows(folder, part)] for part in PARTS}
    assert all(len(set(prompts)) == len(prompts) for prompts in seen.values())
    assert not set(seen["held_out"]) & {*seen["train"], *seen["warmup"]}


def test_answers_are_right_and_the_teacher_often_is_not(folder: Path) -> None:
    for part in PARTS:
        assert all(row["answer"] == "".join(sorted(row["prompt"][:4])) for row in rows(folder, part))
    taught = rows(folder, "warmup")
    right = sum(row["response"] == row["answer"] for row in taught) / len(taught)
    assert 0.3 < right < 0.5


@pytest.mark.parametrize(("said", "score"), [("1358", 1.0), (" 1358\n", 1.0), ("1385", 0.0), ("13588", 0.0), ("", 0.0)])
def test_reward(said: str, score: float) -> None:
    assert load("reward.py:compute_score", "test", HERE)("", said, "1358") == score


@pytest.mark.parametrize(
    ("name", "part", "nodes"),
    [
        ("warmup", "warmup", 2),
        ("grpo", "train", 4),
        ("../experts/warmup", "warmup", 2),
        ("../experts/grpo", "train", 4),
    ],
)
def test_configs_make_a_plan(folder: Path, name: str, part: str, nodes: int) -> None:
    files = [f"data.files={folder / f'{part}.jsonl'}", f"eval.files={folder / 'held_out.jsonl'}"]
    program = Program.load(HERE / f"{name}.yaml", [*files, "data.batch=32"])
    assert program.config.data.batch == 32
    assert len(program.plan(2).flow.nodes) == nodes
    assert program.eval_plan(2, 500).samples == 500
