"""`distflow gpu-check` does what it would on a GPU: here with tiny models, on the CPU and on the rehearsal's device."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerator import autoload
from distflow.cli import main
from distflow.config.model_shape import load_model
from distflow.device.offer import Offer
from distflow.errors import ConfigError
from distflow.first_hour.check import REPORT, Report, Result, check, choose_steps
from distflow.first_hour.facts import fitted
from distflow.first_hour.processes import StepError, run_program
from distflow.first_hour.steps import STEPS, Numbers, Setting, Step, _compare
from distflow.first_hour.table import TEXT, render, write_text

H100 = Offer("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, True)


def hangs(setting: Setting) -> Numbers:
    run_program(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1000)"], setting.log, setting.clock
    )
    return {}


def fails(setting: Setting) -> Numbers:
    run_program([sys.executable, "-c", "raise SystemExit('out of memory')"], setting.log, setting.clock)
    return {}


def breaks(setting: Setting) -> Numbers:
    return {"a": 1 // 0}


def works(setting: Setting) -> Numbers:
    assert (setting.folder / REPORT).exists()  # of the steps before, in case this one takes the machine down
    return {"memory_gib": {"predicted": 2.0, "measured": 1.0}}


def test_a_step_that_fails_or_hangs_stops_no_other_one(tmp_path: Path) -> None:
    steps = [
        Step("fails", "", fails),
        Step("breaks", "", breaks),
        Step("hangs", "", hangs, limit_s=1),
        Step("cannot be done", "", works, needs=("accelerator",)),
        Step("works", "", works),
    ]
    told: list[Result] = []
    report = check(tmp_path, quick=True, workers=3, on_result=told.append, steps=steps)
    write_text(report, tmp_path)
    assert told == report.results
    assert {r.step: r.status for r in told} == {
        "device": "ok",
        "fails": "failed",
        "breaks": "failed",
        "hangs": "too long",
        "cannot be done": "skipped",
        "works": "ok",
    }
    written = json.loads((tmp_path / REPORT).read_text())
    reasons = {step["step"]: step["reason"] for step in written["steps"]}
    assert "out of memory" in reasons["fails"]
    assert "ZeroDivisionError" in reasons["breaks"]
    assert "longer than 1 s" in reasons["hangs"]
    assert reasons["cannot be done"] == "there is no accelerator here"
    assert (written["facts"]["workers"], written["facts"]["kind"]) == (3, "cpu")
    assert not report.well
    text = (tmp_path / TEXT).read_text()
    assert "2 / 1" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_command_runs_a_step_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gpu-check", "--quick", "--workers", "1", "--out", str(tmp_path), "--only", "bfloat16"])
    report = json.loads((tmp_path / REPORT).read_text())
    assert ended.value.code == 0, report
    (step,) = (s for s in report["steps"] if s["step"] == "bfloat16")
    assert step["status"] == "ok"
    assert 0 < step["numbers"]["mismatch"]["measured"] < step["numbers"]["mismatch"]["limit"]
    assert step["numbers"]["tokens_per_s"]["measured"] > 0
    assert "wrote" in capsys.readouterr().out


def test_runs_that_differ_are_told() -> None:
    keys = ("reward/mean", "response_length/mean", "actor/loss", "actor/grad_norm")
    run = [{"step": step, **dict.fromkeys(keys, 0.5)} for step in (1, 2)]
    _compare(run, run, "itself")
    with pytest.raises(StepError, match=r"step 2: actor/loss is 0\.5, and 0\.6 in the other"):
        _compare(run, [run[0], run[1] | {"actor/loss": 0.6}], "the other")
    with pytest.raises(StepError, match=r"steps \[1, 2\], and \[1\] in the other"):
        _compare(run, run[:1], "the other")


def test_models_shrink_to_what_the_device_has() -> None:
    large = load_model("qwen2.5-7b")
    assert fitted(large, 8, H100, 1e12).layers == large.layers
    assert 0 < fitted(large, 1, Offer("cuda", "24 GB", 24 << 30, True), 1e12).layers < large.layers
    assert fitted(large, 8, H100, 4e9).layers < large.layers  # of the disk


def test_a_step_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no step 'resum'.*'resume'"):
        choose_steps(["resum"])
    assert len({s.name for s in STEPS}) == len(STEPS)


def test_a_report_without_a_device_has_a_table() -> None:
    assert render(Report({}, [Result("device", "what is here", "failed", reason="a\nno driver")]))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "rehearsal"])
def test_all_steps_are_done_here(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if device == "rehearsal":
        for name, value in autoload.environment(tmp_path / "package").items():
            monkeypatch.setenv(name, value)
    steps = [s for s in STEPS if s.name != "own tests"]
    report = check(tmp_path / "out", quick=True, workers=2, steps=steps)
    write_text(report, tmp_path / "out")
    of: dict[str, Any] = {r.step: r for r in report.results}
    told = "\n".join(f"{r.step}: {r.status} {r.reason}" for r in report.results)
    assert report.facts["kind"] == device, told
    assert report.well, told
    skipped = {r.step for r in report.results if r.status == "skipped"}
    vllm = {s.name for s in steps if "vllm" in s.needs} if report.facts["vllm"] else set()
    assert skipped == vllm | ({"launches", "on the CPU"} if device == "cpu" else set()), told
    if device == "rehearsal":
        kernels = of["launches"].numbers["kernels"]
        assert 0 <= kernels["measured"] - kernels["predicted"] <= 2  # copies from host memory
        assert of["small on one, builtin"].numbers["memory_gib"].keys() == {"predicted", "measured"}
