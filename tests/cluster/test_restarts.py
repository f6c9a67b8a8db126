"""Restarts are counted since the last progress: a run that goes on and on may fail now and then."""

import json
import os
from pathlib import Path

import pytest

from distflow.cluster.restarts import run_with_restarts
from distflow.cluster.stop_request import StopRequest
from distflow.config import load_config
from distflow.liveness.failures import Failure
from distflow.run_folder import CHECKPOINTS, LATEST


class Attempts:
    """Attempts of workers to run: each ends with a failure, after it has written the checkpoint of a step, if any."""

    def __init__(self, folder: Path, steps: list[int | None], kind: str = "lost") -> None:
        self.latest, self.steps, self.kind = folder / CHECKPOINTS / LATEST, steps, kind
        self.latest.parent.mkdir(parents=True, exist_ok=True)
        self.resumes: list[str | None] = []

    def __call__(self, resume: str | None, owner: str) -> Failure | None:
        number = len(self.resumes)
        self.resumes.append(resume)
        if number == len(self.steps):
            return None
        if (step := self.steps[number]) is not None:
            self.latest.write_text(json.dumps({"step": step}))
            os.utime(self.latest, ns=(0, 1_000_000_000 + number))
        return Failure(self.kind, f"failure {number}")  # type: ignore[arg-type]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(StopRequest, "sleep", lambda self, seconds: waited.append(seconds))
    return waited


def run(folder: Path, attempts: Attempts, allowed: int = 2) -> int:
    (folder / "data.jsonl").write_text('{"prompt": "p"}\n')
    config = folder / "config.yaml"
    config.write_text(f"flow: sft\ndata: data.jsonl\nrun_dir: {folder / 'run'}\nrestarts: {allowed}\n")
    return run_with_restarts(load_config(config), attempts, StopRequest())


def test_a_run_that_comes_further_each_time_is_restarted_again_and_again(tmp_path: Path, delays: list[float]) -> None:
    attempts = Attempts(tmp_path / "run", [1, 2, 3, 4, 5, 6])
    assert run(tmp_path, attempts) == 0
    assert attempts.resumes == [None, *["auto"] * 6]
    assert delays == [1.0] * 6  # each is the first since there was progress


def test_restarts_without_progress_are_used_up_and_take_longer_and_longer(tmp_path: Path, delays: list[float]) -> None:
    attempts = Attempts(tmp_path / "run", [4, None, None, None, None])
    assert run(tmp_path, attempts, allowed=3) == 1
    assert len(attempts.resumes) == 4
    assert delays == [1.0, 2.0, 4.0]


def test_a_checkpoint_of_a_step_that_there_was_before_is_no_progress(tmp_path: Path, delays: list[float]) -> None:
    attempts = Attempts(tmp_path / "run", [4, 3, 4, 4, 5])
    assert run(tmp_path, attempts) == 1
    assert len(attempts.resumes) == 3


def test_each_step_further_has_restarts_of_its_own(tmp_path: Path, delays: list[float]) -> None:
    attempts = Attempts(tmp_path / "run", [4, 4, 5, 5, None])
    assert run(tmp_path, attempts) == 1
    assert len(attempts.resumes) == 5  # two at 4, two more at 5


def test_none_are_allowed(tmp_path: Path, delays: list[float]) -> None:
    attempts = Attempts(tmp_path / "run", [1, 2])
    assert run(tmp_path, attempts, allowed=0) == 1
    assert attempts.resumes == [None]
    assert not delays
