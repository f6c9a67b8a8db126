"""Runs whose conversations are begun early: carried on to the bit, on any layout, and exactly once after kills."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.test_staleness import BATCH, CONFIG, FLOW, ROWS, STEPS, check_same, cut, interrupted, rows, trained
from warm import distflow_run

GAME = """
import time


class Echo:
    '''Repeats what the model said for some turns; some rows are slow.'''

    def __init__(self, env_config=None, extras=None):
        self.row, self.turns = extras, 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        time.sleep(self.row["row"] % 3 / 100)
        said = [{"role": "user", "content": f" {action[:3]}|"}]
        reward = sum(c.isdigit() for c in action) / 8
        return {"observations": said, "reward": reward, "done": self.turns > self.row["row"] % 4, "metadata": {}}

    def close(self):
        pass
"""
CHANGES: dict[str, Any] = {
    "environment": {"call": "game.py:Echo", "turn_tokens": 6},
    "rollout": {"n": 2, "max_tokens": 40, "staleness": 1, "partial": True},
    "reward": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    lines = [{"prompt": f"{'so ' * (i % 3)}what is {i}?", "row": i} for i in range(ROWS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "flow.py").write_text(FLOW)
    (folder / "game.py").write_text(GAME)
    return folder


def run(folder: Path, name: str, rollout: int = 2, resume: str | None = None, main: Any = None) -> Path:
    """Trains on one worker, and has conversations on others."""
    path, run_dir = folder / f"{name}.yaml", folder / name
    (run_dir / "trained").mkdir(parents=True, exist_ok=True)
    placement = {
        "ranks": {"rollout": f"0-{rollout - 1}", "train": str(rollout)},
        "default": {"ranks": "train"},
        "nodes": {"actor.generate": {"ranks": "rollout"}},
    }
    path.write_text(yaml.safe_dump(CONFIG | CHANGES | {"run_dir": str(run_dir), "placement": placement}))
    ended = distflow_run(path, workers=rollout + 1, resume=resume, main=main)
    assert main or ended.codes == [0] * len(ended.codes), ended.err
    return run_dir


@pytest.fixture(scope="module")
def complete(folder: Path) -> Path:
    return run(folder, "complete")


def test_conversations_are_begun_early_and_trained_once(complete: Path) -> None:
    assert sorted(trained(complete)) == [(1 + i // (2 * BATCH), i) for i in range(STEPS * BATCH * 2)]
    curve = rows(complete)[1:]
    assert curve[0]["rollout/carried_frac"] == 0
    assert all(0.2 < r["rollout/carried_frac"] < 1 for r in curve[1:])
    assert all(1 < r["rollout/versions"] <= 2 for r in curve[2:])
    assert all(1 < r["rollout/staleness"] < 2 for r in curve[2:])
    assert all(r["agent/diverged"] == 0 for r in curve)


def test_any_layout_has_the_same_conversations(folder: Path, complete: Path) -> None:
    one = run(folder, "one", rollout=1)
    check_same(one, complete, 1e-3)
    assert trained(one) == trained(complete)


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, complete: Path) -> None:
    cut(complete, folder, "resumed", 4)
    resumed = run(folder, "resumed", resume="newest")
    check_same(resumed, complete, 0)
    assert all(r["agent/diverged"] == 0 for r in rows(resumed)[1:])


def test_after_a_kill_every_sample_is_trained_once(folder: Path, complete: Path) -> None:
    run(folder, "killed", main=partial(interrupted, sign=signal.SIGKILL))
    killed = run(folder, "killed", resume="newest")
    check_same(killed, complete, 0)
    assert trained(killed) == trained(complete)
