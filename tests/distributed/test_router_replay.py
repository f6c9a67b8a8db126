"""Runs of a mixture of experts with router replay, in several layouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.errors import ConfigError
from distflow.run.check import check
from distflow.run.program import Program
from warm import Ended, distflow_run

MODEL: dict[str, Any] = {"arch": "qwen3_moe", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 32}
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "rows.jsonl", "batch": 4},
    "reward": "reward.py:even_digits",
    "model": MODEL,
    "rollout": {"n": 4, "max_tokens": 12, "router_replay": True},
    "train": {"lr": 1.0e-3, "router_aux_loss": 0.1},
    "algo": {"mini_batches": 2, "recompute_old_logprobs": True},
    "steps": 2,
    "wait_limit_s": 60,
}
REWARD = "def even_digits(solution_str):\n    return sum(c in '02468ace' for c in solution_str) / 8\n"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"train": {"micro_tokens": 64}}),
    "tp2": (2, {"placement": {"roles": {"actor": {"dp": 1, "tp": 2}}}}),
    "split": (
        2,
        {
            "placement": {
                "ranks": {"a": "0", "b": "1"},
                "nodes": {"actor.generate": {"ranks": "a"}},
                "default": {"ranks": "b"},
            }
        },
    ),
}
SAME = (
    "actor/loss",
    "actor/grad_norm",
    "router/aux_loss",
    "router/load_max_ratio",
    "router/starved_frac",
    "reward/mean",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"count from {i % 3}"}) + "\n" for i in range(8)))
    (folder / "reward.py").write_text(REWARD)
    return folder


def config(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    merged: dict[str, Any] = CONFIG | {"run_dir": str(folder / name)}
    for section, values in changes.items():
        merged[section] = merged.get(section, {}) | values if isinstance(values, dict) else values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path


def run(folder: Path, name: str, workers: int, changes: dict[str, Any]) -> list[dict[str, float]]:
    ended: Ended = distflow_run(config(folder, name, changes), workers=workers)
    assert ended.codes == [0] * workers, ended.err
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, float]]:
    return run(folder, "alone", 1, {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_has_the_same_losses_and_loads(folder: Path, alone: list[dict[str, float]], name: str) -> None:
    workers, changes = LAYOUTS[name]
    for ours, theirs in zip(run(folder, name, workers, changes), alone, strict=True):
        for key in SAME:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
        assert ours["rollout/mismatch_kl"] < 1e-6  # of the first one
        # The second mini-batch has other weights than the rollout: some routers would choose otherwise now.
        assert 0 < ours["router/mismatch"] < 0.2


def test_without_replay_the_trainer_chooses_for_itself(folder: Path, alone: list[dict[str, float]]) -> None:
    changes = {"rollout": {"router_replay": False}, "train": {"router_aux_loss": 0.0}, "steps": 1}
    (own,) = run(folder, "own", 1, changes)
    assert {m for m in own if m.startswith("router/")} == {"router/load_max_ratio", "router/starved_frac"}
    assert own["reward/mean"] == alone[0]["reward/mean"]
    assert all(1 <= step["router/load_max_ratio"] < 4 and step["router/aux_loss"] > 0.99 for step in alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"partial": True}}, "`router_replay` needs the experts of whole responses, and `partial` begins"),
        ({"environment": {"command": ["true"]}}, "rollout.router_replay: not with conversations"),
    ],
)
def test_what_does_not_go_together_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = Program.load(config(folder, "wrong", changes)).role_bindings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"arch": "qwen2", "hidden": 32}},
            "is a qwen2 model, and experts are replayed for mixtral and",
        ),
        ({"rollout": {"engine": "vllm", "router_replay": True}}, "the engine 'vllm' does not return the experts"),
    ],
)
def test_without_experts_there_is_no_replay(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.router_replay: .*{message}"):
        list(check(Program.load(config(folder, "without", changes))))


def test_the_plan_shows_the_bytes_of_the_experts(folder: Path) -> None:
    plan = Program.load(config(folder, "planned", {})).plan(1)
    assert plan.bytes["response_experts"] == 2 * 2 * 12 / 2  # layers · top-k bytes for each of half the longest
