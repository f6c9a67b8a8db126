"""Runs with an environment: the same conversations on every layout, exact resume, faults that cost their own sample."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from warm import Ended, distflow_run

STEPS = 4
CURVES = ("reward/mean", "actor/loss", "actor/grad_norm", "response_length/mean", "env/environment/turns")
ENVIRONMENT = """
import os
import time


class Echo:
    '''Repeats what the model said, and likes digits. It may be slow, and fail on purpose.'''

    def __init__(self, env_config=None, extras=None):
        self.row, self.turns = extras, 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        time.sleep(self.row["pause"] / 1000)
        if self.row.get("fault") == "raise" and self.turns == 2:
            raise ValueError("no more")
        if self.row.get("fault") == "exit":
            os._exit(3)
        reward = sum(c.isdigit() for c in action) / 8
        said = [{"role": "user", "content": f" {action[:3]}|"}]
        return {"observations": said, "reward": reward, "done": self.turns >= self.row["turns"], "metadata": {}}

    def close(self):
        pass
"""
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo


@node(writes=())
def keep(batch, ctx):
    fields = ("response_tokens", "response_mask")
    rows = {
        int(batch.ids[i]): [batch[f][i].tolist() for f in fields] + [float(batch["env_reward"][i])]
        for i in range(len(batch))
    }
    with open(ctx.folder / f"tokens.{ctx.rank}.jsonl", "a") as file:
        file.write(json.dumps({"step": ctx.step, "rows": rows}) + "\\n")


class Tapped:
    def __init__(self, actor, environment):
        self.logprobs, self.update, self._actor, self._environment = actor.logprobs, actor.update, actor, environment

    def generate(self, prompts):
        rollout = self._actor.converse(prompts, self._environment)
        keep(rollout["response_tokens", "response_mask", "env_reward"])
        return rollout


@flow
def conversing(prompts, actor, environment, reference, reward, *, kl=0.0):
    grpo.fn(prompts, Tapped(actor, environment), reference, reward, kl=kl)
"""
ROWS = [
    {"prompt": f"{'so ' * (i % 3)}say {i}: ", "turns": 1 + i % 3, "pause": 0 if i % 4 else 15} for i in range(12)
]
CONFIG: dict[str, Any] = {
    "flow": "flow.py:conversing",
    "data": {"files": "data.jsonl", "batch": 4},
    "steps": STEPS,
    "algo": {"kl": 0.01},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 40},
    "environment": {"call": "game.py:Echo", "turn_tokens": 8},
    "train": {"lr": 1e-3},
    "wait_limit_s": 60,
}
MODELS = ("actor", "reference")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"roles": {role: {"tp": 2} for role in MODELS}}),
    "converse tp2": (4, {"nodes": {"actor.converse": {"tp": 2}}}),
    "split": (
        4,
        {
            "ranks": {"rollout": "0-1", "train": "2-3"},
            "default": {"ranks": "train"},
            "nodes": {"actor.converse": {"ranks": "rollout"}, "reward.score": {"ranks": "rollout"}},
        },
    ),
}


@dataclass(frozen=True)
class Run:
    metrics: list[dict[str, float]]
    rows: dict[int, list[Any]]  # tokens, mask and reward of each sample
    ended: Ended


def run(folder: Path, name: str, workers: int, resume: str | None = None, **changes: Any) -> Run:
    path, run_dir = folder / f"{name.replace(' ', '-')}.yaml", folder / name.replace(" ", "-")
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    ended = distflow_run(path, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    rows: dict[int, list[Any]] = {}
    for file in run_dir.glob("tokens.*.jsonl"):
        for line in file.read_text().splitlines():
            for sample, row in json.loads(line)["rows"].items():
                assert rows.setdefault(int(sample), row) == row  # tensor-parallel replicas agree
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Run(lines, rows, ended)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "flow.py").write_text(FLOW)
    (folder / "game.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    return run(folder, "alone", 1)


def test_one_worker_has_conversations(alone: Run) -> None:
    """Otherwise the comparisons with it would mean little."""
    assert sorted(alone.rows) == list(range(STEPS * 4 * 4))
    assert all(m["actor/grad_norm"] > 0 and m["rollout/mismatch_max"] < 1e-4 for m in alone.metrics)
    assert any(0 in mask for _, mask, _ in alone.rows.values())
    assert all(m["env/environment/failures"] == 0 for m in alone.metrics)
    assert all(1 < m["env/environment/turns"] < 3 for m in alone.metrics)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_gives_the_same_run(folder: Path, alone: Run, name: str) -> None:
    workers, placement = LAYOUTS[name]
    got = run(folder, name, workers, placement=placement)
    for ours, theirs in zip(got.metrics, alone.metrics, strict=True):
        for curve in CURVES:
            assert ours[curve] == pytest.approx(theirs[curve], rel=1e-3, abs=1e-6), (curve, ours["step"])
        assert ours["rollout/mismatch_max"] < 1e-4
    assert got.rows.keys() == alone.rows.keys()
    equal = sum(got.rows[i][:2] == alone.rows[i][:2] for i in alone.rows)
    print(f"{name}: {equal} of {len(alone.rows)} conversations equal")
    assert equal >= 0.99 * len(alone.rows)
