"""DAPO with generation ahead of training: any layout, a resume on another one, and what was trained, are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distflow.checkpoint.store import list_checkpoints, load_full_tensors
from warm import distflow_run

STEPS, BATCH = 6, 4
FLOW = """
import json

from distflow import flow, node
from distflow.flows.dapo import dapo


@node(writes="trained_id")
def note(batch, ctx):
    with open(ctx.folder / "trained" / f"{ctx.rank}.jsonl", "a") as file:
        rows = zip(batch.ids.tolist(), batch["response_tokens"], strict=True)
        file.writelines(json.dumps([ctx.step, i, tokens.tolist()]) + "\\n" for i, tokens in rows)
    return batch.ids.copy()


class Noted:
    def __init__(self, actor):
        self.logprobs, self.generate, self._update = actor.logprobs, actor.generate, actor.update

    def update(self, tokens, *fields, **constants):
        note(tokens["response_tokens"], *fields)  # the advantage is there after the filter
        self._update(tokens, *fields, **constants)


@flow
def noted(prompts, actor, reference, reward, *, rollout_correction=None):
    dapo.fn(prompts, Noted(actor), reference, reward, max_gen_batches=4, rollout_correction=rollout_correction)
"""
REWARD = """
def any_digit(solution_str):
    return float(any(c in "12" for c in solution_str))
"""
CONFIG: dict[str, Any] = {
    "flow": "flow.py:noted",
    "data": {"files": "data.jsonl", "batch": BATCH},
    "steps": STEPS,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 16, "staleness": 2},
    "train": {"lr": 1e-2},
    "reward": "reward.py:any_digit",
    "checkpoint": {"every": 2, "keep": 10},
    "wait_limit_s": 60,
}
CURVES = ("actor/loss", "actor/grad_norm", "reward/trained_mean", "rollout/staleness", "sampling/discarded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stale-sampling")
    rows = [{"prompt": f"{'so ' * (i % 3)}what is {i} + {i * i % 17}?"} for i in range(50)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(folder: Path, name: str, rollout: int = 2, train: int = 1, resume: str | None = None) -> Path:
    path, run_dir = folder / f"{name}.yaml", folder / name
    (run_dir / "trained").mkdir(parents=True, exist_ok=True)
    ahead = {"ranks": "rollout"}
    placement = {
        "ranks": {"rollout": f"0-{rollout - 1}", "train": f"{rollout}-{rollout + train - 1}"},
        "default": {"ranks": "train"},
        "nodes": {"actor.generate": ahead, "reward.score": ahead, "nonzero_std": ahead},
    }
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir), "placement": placement}))
    ended = distflow_run(path, workers=rollout + train, resume=resume)
    assert ended.codes == [0] * (rollout + train), ended.err
    return run_dir


def rows(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


def trained(run_dir: Path) -> dict[tuple[int, int], list[int]]:
    lines = [json.loads(x) for f in (run_dir / "trained").iterdir() for x in f.read_text().splitlines()]
    return {(step, sample): tokens for step, sample, tokens in lines}


def check_same(got: Path, want: Path, rel: float) -> None:
    ours, theirs = rows(got), rows(want)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        for curve in CURVES:
            assert a[curve] == (pytest.approx(b[curve], rel=rel, abs=1e-6) if rel else b[curve]), (curve, b["step"])
    mine, other = (load_full_tensors(run_dir / "checkpoints" / f"step_{STEPS}" / "actor") for run_dir in (got, want))
    for key in other:
        assert torch.allclose(mine[key], other[key], rtol=rel, atol=1e-4) if rel else torch.equal(mine[key], other[key])


@pytest.fixture(scope="module")
def complete(folder: Path) -> Path:
    return run(folder, "complete")


def test_steps_are_full_of_prompts_that_pass_with_weights_of_two_steps_before(complete: Path) -> None:
    assert [r["rollout/staleness"] for r in rows(complete)] == [0, 1, 2, 2, 2, 2]
    assert max(r["sampling/rounds"] for r in rows(complete)) > 1
    assert sum(r["sampling/discarded"] for r in rows(complete)) > 0
    samples = sorted(trained(complete))
    assert len(samples) == STEPS * BATCH * 2
    assert len({sample for _, sample in samples}) == len(samples)  # once each
    assert [step for step, _ in sorted(samples, key=lambda s: s[1])] == [step for step, _ in samples]


def test_any_layout_trains_on_the_same_samples(folder: Path, complete: Path) -> None:
    other = run(folder, "other", rollout=1, train=2)
    assert trained(other) == trained(complete)
    check_same(other, complete, 1e-3)


@pytest.mark.parametrize(("name", "rollout", "rel"), [("resumed", 2, 0.0), ("resumed-on-fewer", 1, 1e-3)])
def test_a_resumed_run_is_the_uninterrupted_one(
    folder: Path, complete: Path, name: str, rollout: int, rel: float
) -> None:
    shutil.copytree(complete, folder / name)
    for step in list_checkpoints(folder / name / "checkpoints"):
        if step > 2:
            shutil.rmtree(folder / name / "checkpoints" / f"step_{step}")
    shutil.rmtree(folder / name / "trained")
    resumed = run(folder, name, rollout, resume="newest")
    assert trained(resumed) == {k: v for k, v in trained(complete).items() if k[0] > 2}
    check_same(resumed, complete, rel)
    if not rel:  # also what is logged of all that was generated
        assert [r["reward/mean"] for r in rows(resumed)] == [r["reward/mean"] for r in rows(complete)]
