"""The package as users have it: a wheel, installed in a fresh environment (`make test-wheel`)."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import distflow
from limits import load_factor

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
pytestmark = pytest.mark.wheel


def installed() -> set[str]:
    """Returns the files of the installed package, without metadata, scripts and what Python compiled."""
    files = {str(f) for f in distribution("distflow-rl").files or ()}
    return {f for f in files if not f.startswith("..") and ".dist-info/" not in f and "__pycache__" not in f}


def test_the_package_comes_from_the_wheel_only() -> None:
    place = Path(distflow.__file__).parent
    assert place.is_relative_to(sys.prefix)
    assert not any(Path(p).is_relative_to(SOURCE) for p in sys.path if p)


def test_the_wheel_has_every_file_of_the_package_and_no_other() -> None:
    """No tests, no benchmarks; the page's files, `py.typed` and descriptions of hardware are there."""
    tree = {str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert installed() == tree
    assert {"distflow/py.typed", "distflow/page/static/index.html", "distflow/config/models.yaml"} <= tree


def test_the_wheel_has_the_version_and_the_licence() -> None:
    wheel = distribution("distflow-rl")
    assert wheel.version == distflow.__version__
    assert any(str(f).endswith("licenses/LICENSE") for f in wheel.files or ())


def test_the_first_hour(tmp_path: Path) -> None:
    """The example that sorts, for a few steps: check, plan, SFT, export, GRPO, evaluation, and looking at it."""
    example = tmp_path / "examples" / "sorting"
    shutil.copytree(ROOT / "examples" / "sorting", example)
    runs = tmp_path / "runs" / "sorting"

    def done(program: str, *words: str) -> str:
        command = [str(Path(sys.executable).parent / program), *words]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300 * load_factor())
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    done("python", str(example / "data.py"), str(runs))
    warmup, grpo = "examples/sorting/warmup.yaml", "examples/sorting/grpo.yaml"
    short = ["data.batch=8", "rollout.n=4", "steps=2", "eval.every=2", "eval.limit=16"]
    assert "parameters" in done("distflow", "check", warmup)
    assert "2 workers" in done("distflow", "plan", warmup)
    done("distflow", "run", warmup, *short)
    done("distflow", "export", "runs/sorting/warmup", "runs/sorting/model")
    done("distflow", "run", grpo, *short)
    rows = [json.loads(line) for line in (runs / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == [1, 2]
    assert "val/all/score" in done("distflow", "eval", grpo, "--checkpoint", *short)
    assert "runs/sorting/grpo" in done("distflow", "runs", "runs/sorting")
    done("distflow", "trace", "runs/sorting/grpo")
    done("distflow", "show", "--html", "page.html", "runs/sorting/grpo")
    assert "uPlot" in (tmp_path / "page.html").read_text()
