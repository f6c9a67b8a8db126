"""Runs whose prompts follow what the model can do: the same prompts on any layout, and after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.test_staleness import check_same, cut, rows, trained
from warm import distflow_run

STEPS = 8  # as that module's
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo


@node(writes="trained_id")
def note(batch, ctx):
    with open(ctx.folder / "trained" / f"{ctx.rank}.jsonl", "a") as file:
        rows = zip(batch.ids.tolist(), batch["row"], batch["response_tokens"], strict=True)
        file.writelines(json.dumps([ctx.step, i, row, tokens.tolist()]) + "\\n" for i, row, tokens in rows)
    return batch.ids.copy()


class Noted:
    def __init__(self, actor, prompts):
        self.logprobs, self.generate, self._update, self.prompts = actor.logprobs, actor.generate, actor.update, prompts

    def update(self, tokens, *fields, **constants):
        note(self.prompts["row"], tokens["response_tokens"])
        self._update(tokens, *fields, **constants)


@flow
def noted(prompts, actor, reference, reward):
    grpo.fn(prompts, Noted(actor, prompts), reference, reward)
"""
REWARD = """
def by_row(prompts, completions, row, **columns):
    return [float(r < 100 or (r < 200 and any(c in "1234567" for c in text))) for r, text in zip(row, completions)]


def by_text(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""
CONFIG: dict[str, Any] = {
    "flow": "flow.py:noted",
    "data": {
        "sources": {"easy": "easy.jsonl", "hard": {"files": ["hard.jsonl", "harder.jsonl"], "ratio": 2.0}},
        "curriculum": {"drop_solved": 1.0, "drop_unsolved": 0.0, "adapt": True, "memory": 0.5},
        "batch": 6,
    },
    "steps": STEPS,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 12},
    "train": {"lr": 1e-2},
    "reward": "reward.py:by_row",
    "eval": {"files": "easy.jsonl", "every": 4, "limit": 4},
    "checkpoint": {"every": 2, "keep": 10},
    "wait_limit_s": 60,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curriculum")
    for name, first, count in (("easy", 0, 20), ("hard", 100, 24), ("harder", 200, 8)):
        lines = [{"prompt": f"what is {i}?", "row": i} for i in range(first, first + count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(folder: Path, name: str, workers: int = 1, resume: str | None = None, **changes: Any) -> Path:
    path, run_dir = folder / f"{name}.yaml", folder / name
    (run_dir / "trained").mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(CONFIG | changes | {"run_dir": str(run_dir)}))
    ended = distflow_run(path, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    return run_dir


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    return run(folder, "alone")


def test_prompts_are_dropped_and_sources_have_metrics(alone: Path) -> None:
    curve, drawn = rows(alone)[1:], trained(alone)
    assert curve[0]["source/easy/share"] == pytest.approx(1 / 3)
    assert curve[-1]["source/easy/share"] < 1 / 3  # it is solved
    assert all(r["source/easy/pass_rate"] == r["source/easy/score"] == 1 for r in curve if "source/easy/pass_rate" in r)
    assert [r["source/hard/dropped"] for r in curve[:3]][:2] == [0, 0]
    assert curve[-1]["source/easy/dropped"] > 0
    assert curve[-1]["source/hard/dropped"] > 0
    by_step = [{row for (step, _), (row, _) in drawn.items() if step == s} for s in range(1, STEPS + 1)]
    for s in range(2, STEPS):
        solved = {row for rows_of_step in by_step[: s - 1] for row in rows_of_step if row < 100 or row >= 200}
        assert not solved & by_step[s]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_layout_has_the_same_prompts(folder: Path, alone: Path, workers: int) -> None:
    other = run(folder, f"on-{workers}", workers)
    check_same(other, alone, 1e-3)
    assert trained(other) == trained(alone)


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, alone: Path) -> None:
    cut(alone, folder, "resumed", 4)
    resumed = run(folder, "resumed", resume="newest")
    check_same(resumed, alone, 0)


def test_generation_that_is_ahead_has_results_later(folder: Path) -> None:
    placement = {
        "ranks": {"rollout": "0", "train": "1"},
        "default": {"ranks": "train"},
        "nodes": {"actor.generate": {"ranks": "rollout"}},
    }
    rollout = CONFIG["rollout"] | {"staleness": 1, "partial": True}
    changes = {"placement": placement, "rollout": rollout}
    ahead = run(folder, "ahead", 2, **changes)
    cut(ahead, folder, "ahead-resumed", 4)
    check_same(run(folder, "ahead-resumed", 2, resume="newest", **changes), ahead, 0)
    dropped = [r["source/easy/dropped"] for r in rows(ahead)[1:]]
    assert dropped[:3] == [0, 0, 0]
    assert dropped[-1] > 0


def test_sources_go_with_dynamic_sampling_to_the_bit(folder: Path) -> None:
    changes: dict[str, Any] = {
        "flow": "dapo",
        "data": {"sources": CONFIG["data"]["sources"], "batch": 6},
        "reward": "reward.py:by_text",
    }
    sampled = run(folder, "sampled", 2, **changes)
    cut(sampled, folder, "sampled-resumed", 4)
    check_same(run(folder, "sampled-resumed", 2, resume="newest", **changes), sampled, 0)
    assert not any(name.startswith("source/") for name in rows(sampled)[1])  # prompts are chosen by their results
