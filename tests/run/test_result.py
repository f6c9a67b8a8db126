"""What the Python API reads from a run's folder, and its calls per step."""

import json
import time
from pathlib import Path

import pytest

from distflow.run import result
from distflow.run.result import RunResult, StepCalls
from limits import wait_until


def line(step: int, at: float) -> str:
    return json.dumps({"step": step, "time": at, "reward/mean": step / 10}) + "\n"


def test_a_result_has_the_metrics_of_complete_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1, 0.0) + line(2, 1.0) + line(3, 2.0)[:-9])
    read = RunResult.read(tmp_path)
    assert [row["step"] for row in read.metrics] == [1, 2]
    assert read.last["reward/mean"] == 0.2
    assert read.checkpoint is None


def test_damaged_lines_are_no_steps(tmp_path: Path) -> None:
    damaged = b'7\n{}\n\xff\n[]\n{"step": "1"}\n' + b"[" * 100_000 + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(damaged + b'{"step": 1}\n{"step": 2, "time": "?"}\n')
    assert [row["step"] for row in RunResult.read(tmp_path).metrics] == [1, 2]
    steps: list[int] = []
    calls = StepCalls(tmp_path, lambda step, metrics: steps.append(step))
    with calls, (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line(3, time.time()))
    calls.raise_error()
    assert steps == [3]


def test_each_step_of_this_run_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "POLL_S", 0.01)
    path = tmp_path / "metrics.jsonl"
    steps: list[tuple[int, float]] = []
    path.write_text(line(7, time.time() - 100))  # of an earlier run in this folder

    def wait_for(count: int) -> None:
        wait_until(lambda: len(steps) >= count, state=lambda: steps)

    with StepCalls(tmp_path, lambda step, metrics: steps.append((step, metrics["reward/mean"]))):
        path.rename(tmp_path / "metrics.1.jsonl")
        path.write_text(line(1, time.time()))
        wait_for(1)
        with path.open("a") as file:
            second = line(2, time.time())
            file.write(second[:20])
            file.flush()
            time.sleep(0.05)  # half a line is nobody's step yet
            file.write(second[20:])
        wait_for(2)
        kept = path.with_suffix(".part")  # a restart writes the log again, up to the step it continues from
        kept.write_text(line(1, time.time()))
        kept.rename(path)
        with path.open("a") as file:
            file.write(line(2, time.time()) + line(3, time.time()))
    assert steps == [(1, 0.1), (2, 0.2), (3, 0.3)]
