"""Complete runs on a device that refuses CPU tensors: every role of a flow, moves, checkpoints, resuming."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm
from accelerator.rehearse import run_on_cpu, run_on_device

REWARD = """
def digits(solution_str):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
CONFIG: dict[str, Any] = {
    "data": {"files": "data.jsonl", "batch": 4},
    "steps": 2,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 8},
    "train": {"lr": 1e-3, "dtype": "float32"},
    "critic": {"dtype": "float32"},
    "reward": "reward.py:digits",
    "wait_limit_s": 60,
}
NO_ROLLOUT = {"reward": None, "rollout": {"max_tokens": 8}}
APART = {
    "ranks": {"first": "0", "last": "1"},
    "default": {"ranks": "last"},
    "nodes": {"actor.generate": {"ranks": "first"}},
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "grpo": (1, {"flow": "grpo", "algo": {"kl": 0.01, "mini_batches": 2, "recompute_old_logprobs": True}}),
    "grpo, ahead": (
        2,
        {
            "flow": "grpo",
            "placement": APART,
            "eval": {"files": "data.jsonl", "every": 2},
            "rollout": {"n": 4, "max_tokens": 8, "staleness": 1},
        },
    ),
    "ppo": (2, {"flow": "ppo", "algo": {"kl_in_reward": 0.05}}),
    "dapo": (2, {"flow": "dapo"}),
    "opo": (1, {"flow": "opo"}),
    "dpo": (2, {"flow": "dpo", **NO_ROLLOUT}),
    "reward model": (2, {"flow": "reward_model", **NO_ROLLOUT}),
}
SLOW = ("dapo", "opo", "dpo", "reward model")
METRICS = (
    "reward/mean",
    "response_length/mean",
    "actor/loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "reward_model/loss",
)


def run(folder: Path, name: str, start: Callable[..., warm.Ended], *overrides: str, resume: str | None = None) -> Any:
    """Returns the metrics of all steps."""
    workers, changes = RUNS[name]
    config = {k: v for k, v in (CONFIG | changes | {"run_dir": str(folder / "run")}).items() if v is not None}
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"count to {i}", "chosen": str(i), "rejected": "no" * (1 + i % 3)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    ended = start(folder / "config.yaml", *overrides, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS]
)
def test_a_run_has_the_same_metrics_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    ours, theirs = (run(tmp_path / start.__name__, name, start) for start in (run_on_device, run_on_cpu))
    assert len(ours) == len(theirs) > 0
    for mine, expected in zip(ours, theirs, strict=True):
        compared = {key: expected[key] for key in METRICS if key in expected}
        assert {key: mine[key] for key in compared} == pytest.approx(compared, rel=1e-3, abs=1e-4)


def test_the_peak_of_memory_is_that_of_its_step(tmp_path: Path) -> None:
    """A step with short prompts needs less than the one with long prompts before it."""
    rows = [{"prompt": "count " * (200 if i < 4 else 1)} for i in range(8)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ("data.files=long.jsonl", "data.shuffle=false")
    long, short = (m["perf/device_peak_mib"] for m in run(tmp_path, "grpo", run_on_device, *overrides))
    assert 0 < short < 0.8 * long


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    name = "grpo, ahead"
    run(tmp_path, name, run_on_device, "steps=1")
    metrics = run(tmp_path, name, run_on_device, "steps=2", resume=str(tmp_path / "run"))
    assert [m["step"] for m in metrics if "actor/loss" in m] == [1, 2]
