"""The example with pictures: its data, reward and configs, and, as a slow test, what it learns."""

import io
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from distflow.flow.importing import load
from distflow.run.program import Program

HERE = Path(__file__).parents[2] / "examples" / "seeing"
PARTS = ("held_out", "blind", "train", "warmup")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    load("data.py:write", "test", HERE)(made, held_out=20, warmup=200, train=40)
    return made


def test_data_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    load("data.py:write", "test", HERE)(tmp_path, held_out=20, warmup=200, train=40)
    for part in PARTS:
        name = f"{part}.parquet"
        assert pq.read_table(folder / name).equals(pq.read_table(tmp_path / name))


def test_the_teacher_names_the_colour_in_a_third_of_the_answers(folder: Path) -> None:
    rows = pq.read_table(folder / "warmup.parquet").to_pylist()
    right = [row["response"] == row["answer"] for row in rows]
    assert 0.2 < sum(right) / len(right) < 0.4
    assert all(row["response"] in (row["answer"], "no idea") for row in rows)
    assert all(Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (32, 32) for row in rows)


def test_nothing_but_the_picture_tells_the_answer(folder: Path) -> None:
    rows = pq.read_table(folder / "warmup.parquet").to_pylist()
    assert len({str(row["prompt"]) for row in rows}) == 1
    counts = Counter(row["answer"] for row in rows)
    assert len(counts) == 10
    assert max(counts.values()) < 0.2 * len(rows)
    held_out, blind = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("held_out", "blind"))
    assert [row["answer"] for row in blind] == [row["answer"] for row in held_out]
    assert all(one["images"] != other["images"] for one, other in zip(blind, held_out, strict=True))


@pytest.mark.slow
def test_the_demo_learns_to_see() -> None:
    out = subprocess.run([sys.executable, HERE / "demo.py"], capture_output=True, text=True, timeout=900, check=True)
    before, after = (float(x) for x in re.findall(r"([\d.]+)% (?:before|after)", out.stdout))
    [blind] = (float(x) for x in re.findall(r"same questions: ([\d.]+)%", out.stdout))
    assert before < 40
    assert after > 90
    assert blind < 25


@pytest.mark.parametrize(("said", "score"), [("red", 1.0), (" red\n", 1.0), ("no idea", 0.0), ("", 0.0)])
def test_reward(said: str, score: float) -> None:
    assert load("reward.py:compute_score", "test", HERE)("", said, "red") == score


@pytest.mark.parametrize(("name", "part", "nodes"), [("warmup", "warmup", 2), ("grpo", "train", 4)])
def test_configs_make_a_plan(folder: Path, name: str, part: str, nodes: int) -> None:
    files = [f"data.files={folder / f'{part}.parquet'}", f"eval.files={folder / 'held_out.parquet'}"]
    arch = [] if name == "warmup" else ["model={arch: qwen2_5_vl}"]
    program = Program.load(HERE / f"{name}.yaml", [*files, "data.batch=32", *arch])
    plan = program.plan(2)
    assert len(plan.flow.nodes) == nodes
    assert "images" in plan.flow.node("actor.update").reads
    assert program.eval_plan(2, 20).samples == 20
