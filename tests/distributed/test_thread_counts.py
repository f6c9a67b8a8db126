"""A run in float32 on CPUs is the same to the bit in any number of threads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distflow.checkpoint.store import load_full_tensors
from warm import cli_main, distflow_run

STEPS = 6
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "algo": {"kl": 0.01},
    "data": {"files": "data.jsonl", "batch": 4},
    "steps": STEPS,
    # Large enough that PyTorch splits a sum over a matrix among its threads.
    "model": {"arch": "qwen2", "hidden": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 512},
    "rollout": {"n": 4, "max_tokens": 12},
    "train": {"lr": 1e-2},
    "reward": "reward.py:any_digit",
    "checkpoint": {"every": STEPS},
}
FLOWS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo, an adapter": {"flow": "ppo", "critic": {"lr": 1e-2}, "train": {"lr": 1e-2, "lora": {"rank": 3}}},
}
REWARD = """
def any_digit(solution_str):
    return float(any(c in "1234" for c in solution_str))
"""
TIMINGS = ("time", "timing_", "perf/")


def with_three_threads(words: list[str]) -> None:
    torch.set_num_threads(3)
    cli_main(words)


@pytest.mark.parametrize("flow", FLOWS)
def test_weights_and_metrics_do_not_depend_on_the_number_of_threads(flow: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{'so ' * (i % 3)}what is {i}?"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    outcomes = []
    for name, main in (("one", cli_main), ("three", with_three_threads)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(CONFIG | FLOWS[flow] | {"run_dir": str(tmp_path / name)}))
        ended = distflow_run(path, main=main)
        assert ended.codes == [0], ended.err
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        metrics = [{k: v for k, v in line.items() if not k.startswith(TIMINGS)} for line in lines]
        outcomes.append((metrics, load_full_tensors(tmp_path / name / "checkpoints" / f"step_{STEPS}" / "actor")))
    (curve, weights), (other_curve, other_weights) = outcomes
    assert curve == other_curve
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(other_weights[key], tensor) for key, tensor in weights.items())
