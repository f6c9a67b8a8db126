"""Whatever the layout, a run in bfloat16 on the device has the same curves and samples, as near as 16 bits allow."""

from pathlib import Path
from typing import Any

import pytest

from accelerator.rehearse import run_on_device
from distributed.test_any_layout import CURVES, LAYOUTS, Run, equal_tokens, run, with_inputs

pytestmark = pytest.mark.slow

CHANGES: dict[str, Any] = {"steps": 4, "train": {"lr": 1e-3, "dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_inputs(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    return run(folder, "alone", 1, run_on_device, **CHANGES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_gives_the_same_run(folder: Path, alone: Run, name: str) -> None:
    workers, placement = LAYOUTS[name]
    got = run(folder, name, workers, run_on_device, placement=placement, **CHANGES)
    assert [m["step"] for m in got.metrics] == [m["step"] for m in alone.metrics]
    for ours, theirs in zip(got.metrics, alone.metrics, strict=True):
        print({curve: (ours[curve], theirs[curve]) for curve in CURVES})
    assert equal_tokens(name, got, alone) > 0.99
    for ours, theirs in zip(got.metrics, alone.metrics, strict=True):
        near = {curve: pytest.approx(theirs[curve], rel=5e-3, abs=1e-4) for curve in CURVES}
        assert {curve: ours[curve] for curve in CURVES} == near, ours["step"]
        assert ours["rollout/mismatch_max"] < 0.02  # of bfloat16
