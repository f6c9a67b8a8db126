"""The treasure hunt: its boards and rules, and a step of training; the whole demo is too long to be run here."""

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.flow.importing import load
from warm import distflow_run

HERE = Path(__file__).parents[2] / "examples" / "treasure"
PARTS = ("held_out", "train", "warmup")


def rows(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("treasure")
    load("game.py:write", "test", HERE)(made)
    return made


def test_held_out_boards_are_never_trained_on(folder: Path) -> None:
    held_out, trained = ({(*r["start"], *r["treasure"]) for r in rows(folder, part)} for part in PARTS[:2])
    assert (len(held_out), len(trained)) == (100, 500)
    assert not held_out & trained
    moves = rows(folder, "warmup")
    assert all(row["response"] in "NSEW" for row in moves)
    first = [row for row in moves if "<eos>" not in row["prompt"]]
    right = sum(row["response"] in row["prompt"].split()[1] for row in first) / len(first)
    assert 0.3 < right < 0.5  # the teacher is mostly wrong


def test_following_the_compass_finds_every_treasure(folder: Path) -> None:
    hunt, compass = load("game.py:Hunt", "test", HERE), load("game.py:compass", "test", HERE)
    for row in rows(folder, "held_out"):
        game = hunt(extras=row)
        messages, _ = game.init([{"role": "user", "content": row["prompt"]}])
        done, total, said = False, 0.0, messages[0]["content"]
        while not done:
            step = game.step(said.split()[1][0])  # the first letter of what the compass says
            done, said, total = step["done"], step["observations"][0]["content"] + " .", total + step["reward"]
        assert game.get_metrics() == {"found": 1.0}
        distance = sum(abs(a - b) for a, b in zip(row["start"], row["treasure"], strict=True))
        assert total == pytest.approx(distance / 8)
        assert compass(row["start"], row["treasure"]) in row["prompt"]


def test_a_step_of_training(folder: Path, tmp_path: Path) -> None:
    model = "model={arch: qwen2, hidden: 32, layers: 1, heads: 4, kv_heads: 2}"
    data = f"data={{files: {folder}/train.jsonl, batch: 4}}", f"eval={{files: {folder}/held_out.jsonl, limit: 4}}"
    path = tmp_path / "rl.yaml"
    path.write_text((HERE / "rl.yaml").read_text().replace("game.py", f"{HERE}/game.py"))
    ended = distflow_run(path, model, *data, "steps=1", f"run_dir={tmp_path}/run")
    assert ended.codes == [0], ended.err
    first, last = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0 <= first["val/env/environment/found"] <= 1
    assert last["env/environment/failures"] == 0
    assert last["env/environment/turns"] == 8  # random weights find no move
