"""The examples with tools and with a black-box agent, for a step each."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm import distflow_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["agent.py:play", "program"])
def test_a_black_box_agent(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "agent"
    shutil.copytree(EXAMPLES / "agent", folder, ignore=shutil.ignore_patterns("__pycache__"))
    if how == "program":
        config = (folder / "agent.yaml").read_text()
        (folder / "agent.yaml").write_text(config.replace("call: agent.py:play", "command: [python, agent.py]"))
    small = ("steps=1", "data.batch=2", "rollout.n=2", "environment.time_limit_s=300")  # also on a busy machine
    ended = distflow_run(folder / "agent.yaml", *small, workers=1, folder=tmp_path)
    assert ended.codes == [0], ended.err
    [step] = metrics(tmp_path / "runs" / "agent")
    [name] = {key.split("/")[1] for key in step if key.startswith("env/")}
    assert step[f"env/{name}/failures"] == 0
    assert step[f"env/{name}/turns"] >= 1


def test_a_calculator(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "calculator"
    shutil.copytree(EXAMPLES / "calculator", folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, folder / "calculator.py", tmp_path / "runs" / "calculator"], check=True)
    model = "model={arch: qwen2, hidden: 32, layers: 2, heads: 4, kv_heads: 2}"
    small = ("steps=1", "data.batch=2", "rollout.n=2", "environment.time_limit_s=300", "eval=null", model)
    ended = distflow_run(folder / "grpo.yaml", *small, workers=1, folder=tmp_path)
    assert ended.codes == [0], ended.err
    [step] = metrics(tmp_path / "runs" / "calculator" / "grpo")
    assert any(key.startswith("env/") and key.endswith("/turns") for key in step)
