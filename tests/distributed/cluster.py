"""What tests of several hosts share: a small training run, slow enough to be disturbed, and its curve."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from limits import TimeLimit

STEPS = 8
REWARD = """
import time

def any_digit(solution_str):
    time.sleep(0.1)  # so that a step takes a while
    return float(any(c in "1234" for c in solution_str))
"""
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 8},
    "steps": STEPS,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 12},
    "train": {"lr": 1e-3},
    "reward": "reward.py:any_digit",
    "checkpoint": {"every": 1},
    "workers": 4,
}
CURVES = ("actor/loss", "actor/grad_norm", "reward/mean")


def write_config(folder: Path, **changes: Any) -> Path:
    prompts = [f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?" for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return path


def curve(run_dir: Path, names: Sequence[str] = CURVES) -> list[list[Any]]:
    """Returns step and curves of a run, bit for bit; None where a step has no value."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[row["step"], *(row.get(name) for name in names)] for row in rows]


def saved_step(run_dir: Path) -> int:
    """Returns the step of the newest checkpoint, −1 without any."""
    pointer = run_dir / "checkpoints" / "latest"
    return int(json.loads(pointer.read_text())["step"]) if pointer.exists() else -1


def wait_until(
    condition: Callable[[], bool], processes: "list[subprocess.Popen[Any]]", log: Path, limit_s: float = 300
) -> None:
    """Returns when the condition holds; no process may end before."""
    limit = TimeLimit(limit_s)
    while not condition():
        ended = [p.returncode for p in processes if p.poll() is not None]
        assert not ended, f"ended with {ended}:\n{log.read_text()}"
        assert limit.left() > 0, f"still waiting after {limit}:\n{log.read_text()}"
        time.sleep(0.05)
