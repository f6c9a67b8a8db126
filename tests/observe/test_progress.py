"""What a step's line shows."""

import json
import sys
from pathlib import Path

import pytest

from distflow.observe.progress import Progress, step_line
from distflow.util import patient_files

METRICS = {
    "actor/entropy": 1.5,
    "reward/mean": 0.25,
    "actor/loss": 0.1,
    "actor/grad_norm": 2.0,
    "response_length/mean": 12.0,
    "timing_s/update": 3.0,
}


def test_the_numbers_worth_a_glance_come_first() -> None:
    assert step_line(METRICS) == "reward/mean 0.25  actor/loss 0.1  response_length/mean 12  actor/grad_norm 2"


def test_a_line_has_throughput_and_the_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(tmp_path, 121)
    times = {"timing_s/step": 8.0, "timing_max_s/step": 10.0, "perf/tokens": 34567.0}
    progress(1, {"reward/mean": 0.5, **times})
    progress(121, {"reward/mean": 0.5, **times})
    progress._count = 0
    progress.close()
    first, last = capsys.readouterr().out.splitlines()
    assert first == "step 1/121  20 min left  10 s  3,457 tokens/s  reward/mean 0.5"
    assert last == "step 121/121  10 s  3,457 tokens/s  reward/mean 0.5"


def test_a_rollout_of_another_model_than_is_trained_shows() -> None:
    assert "mismatch" not in step_line(METRICS | {"rollout/mismatch_kl": 0.001})
    assert step_line(METRICS | {"reward/failures": 0.0}) == step_line(METRICS)
    assert step_line(METRICS | {"reward/failures": 3.0}).endswith("actor/grad_norm 2  reward/failures 3")
    assert step_line(METRICS | {"rollout/mismatch_kl": 3.1}).endswith("actor/grad_norm 2  rollout/mismatch_kl 3.1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_an_output_that_takes_nothing_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(patient_files.logger, "warning", lambda text, *args: warned.append(text % args))
    out = open("/dev/full", "w")  # noqa: SIM115 (its end fails, too)
    with monkeypatch.context() as output:
        output.setattr(sys, "stdout", out)
        progress = Progress(tmp_path, 3, skipped=["row 7"], skipped_count=1)
        for step in (0, 1, 2):
            progress(step, {"reward/mean": float(step), "timing_s/step": 1.0})
    with pytest.raises(OSError, match="No space left"):
        out.close()
    progress._sums.clear()
    progress._count = 0
    progress.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [text for text in warned if "cannot be written" in text] == [
        "the output of the run: cannot be written (No space left on device); the run goes on and tries it again"
    ]
