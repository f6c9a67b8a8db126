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
ROWS = [{"prompt": f"{'so ' * (i % 3)}say {i}: ", "turns": 1 + i % 3, "pause": 0 if i % 4 else 15} for i in range(12)]
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
    assert all(m["actor/grad_norm"] > 0 and m["rollout/mismatch_max"] == 0 for m in alone.metrics)
    assert any(0 in mask for _, mask, _ in alone.rows.values())
    assert all(m["env/environment/failures"] == 0 and m["rollout/reused"] > 0.2 for m in alone.metrics)
    assert all(1 < m["env/environment/turns"] < 3 for m in alone.metrics)


@pytest.mark.parametrize("name", ["dp2", "converse tp2", "split", pytest.param("tp2", marks=pytest.mark.slow)])
def test_any_layout_gives_the_same_run(folder: Path, alone: Run, name: str) -> None:
    workers, placement = LAYOUTS[name]
    got = run(folder, name, workers, placement=placement)
    for ours, theirs in zip(got.metrics, alone.metrics, strict=True):
        for curve in CURVES:
            assert ours[curve] == pytest.approx(theirs[curve], rel=1e-3, abs=1e-6), (curve, ours["step"])
        assert ours["rollout/mismatch_max"] <= (1e-4 if "tp" in name else 0)
    assert got.rows.keys() == alone.rows.keys()
    equal = sum(got.rows[i][:2] == alone.rows[i][:2] for i in alone.rows)
    print(f"{name}: {equal} of {len(alone.rows)} conversations equal")
    assert equal >= 0.99 * len(alone.rows)


EXACT = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/kl", "response_length/mean")


def check_bits(got: Run, want: Run) -> None:
    for ours, theirs in zip(got.metrics, want.metrics, strict=True):
        assert {c: ours[c] for c in EXACT} == {c: theirs[c] for c in EXACT}, ours["step"]
    assert got.rows == want.rows


def test_a_run_is_the_same_to_the_bit_however_slow_its_environment_is(folder: Path, alone: Run) -> None:
    """Which conversations decode together depends on time; what is trained on does not."""
    rows = [{**row, "pause": (i * 7) % 5 * 9} for i, row in enumerate(ROWS)]
    (folder / "slow.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_bits(run(folder, "slow", 1, data={"files": "slow.jsonl", "batch": 4}), alone)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(folder: Path, alone: Run) -> None:
    checkpoint = {"every": 1, "keep": 9}
    run(folder, "resumed", 1, steps=2, checkpoint=checkpoint)
    check_bits(run(folder, "resumed", 1, resume=str(folder / "resumed"), checkpoint=checkpoint), alone)


@pytest.mark.slow
def test_conversations_may_be_ahead_and_leave_in_chunks(folder: Path) -> None:
    split: dict[str, Any] = {"placement": LAYOUTS["split"][1], "checkpoint": {"every": 1, "keep": 9}}
    ahead = run(folder, "ahead", 4, **split, rollout={"n": 4, "max_tokens": 40, "staleness": 1})
    assert [m["rollout/staleness"] for m in ahead.metrics] == [0, 1, 1, 1]
    chunks = run(folder, "chunks", 4, **split, rollout={"n": 4, "max_tokens": 40, "staleness": 1, "chunk": 2})
    assert chunks.rows == ahead.rows
    for ours, theirs in zip(chunks.metrics, ahead.metrics, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-3, abs=1e-6)


def test_a_failure_costs_its_own_sample(folder: Path) -> None:
    faults = {1: "raise", 2: "exit"}
    rows = [{**row, "turns": 3, "fault": faults.get(i)} for i, row in enumerate(ROWS[:4])]
    (folder / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    got = run(folder, "faults", 2, steps=1, data={"files": "faults.jsonl", "batch": 4})
    assert got.metrics[0]["env/environment/failures"] == 8
    log = (folder / "faults" / "environments.log").read_text().splitlines()
    assert len(log) == 8
    assert sum("raised ValueError: no more" in line for line in log) == 4
    assert sum("exit" in line for line in log) == 4
    failed = {int(line.split("sample ")[1].split(":")[0]) for line in log}
    assert all(got.rows[i][2] == 0 for i in failed)
    assert any(got.rows[i][2] for i in got.rows.keys() - failed)


SEVERAL: dict[str, Any] = {
    "likes_digits": {"call": "game.py:Echo", "turn_tokens": 8, "max_turns": 2},
    "short": {"call": "game.py:Echo", "turn_tokens": 3},
}


def test_ppo_learns_from_rewards_of_turns_in_several_environments(folder: Path) -> None:
    rows = [{**row, "environment": ("short", "likes_digits")[i % 3 == 0]} for i, row in enumerate(ROWS)]
    (folder / "several.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {"flow": "ppo", "algo": {}, "critic": {"lr": 1e-2}}
    changes |= {"environment": None, "environments": SEVERAL}
    changes |= {"data": {"files": "several.jsonl", "batch": 4}, "eval": {"files": "several.jsonl", "limit": 4}}
    path = folder / "ppo.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / "ppo"), "steps": 2} | changes))
    ended = distflow_run(path, workers=2)
    assert ended.codes == [0, 0], ended.err
    first, *_, last = [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert last["env/likes_digits/turns"] <= 2
    assert last["env/short/reward"] >= 0
    assert last["critic/grad_norm"] > 0
    assert "val/env/short/turns" in first
    assert "val/all/score" in last


def test_a_row_with_an_unknown_environment_is_refused_before_training(folder: Path) -> None:
    rows = [{**row, "environment": "shrot" if i == 7 else "short"} for i, row in enumerate(ROWS)]
    (folder / "unknown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "unknown.yaml"
    changes = {"environment": None, "environments": SEVERAL, "data": {"files": "unknown.jsonl", "batch": 4}}
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / "unknown")} | changes))
    ended = distflow_run(path, workers=1)
    assert ended.codes == [1]
    assert "unknown.jsonl:8: the column 'environment' is 'shrot', and there is no such environment" in ended.err
    assert "did you mean 'short'?" in ended.err
    assert not (folder / "unknown" / "metrics.jsonl").read_text()
