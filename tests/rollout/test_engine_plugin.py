"""A rollout engine in one file of another package, brought by entry point: the config names it, and it trains."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distflow.config.schema import RolloutConfig
from distflow.errors import ConfigError
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import load_engine
from distflow.rollout.registry import engines
from distflow.rollout.vllm.engine import VllmEngine
from distflow.run.program import Program
from limits import load_factor

FILES = Path(__file__).parent
ENTRIES = """[distflow.engines]
toy = toy_engine:ToyEngine
forgetful = toy_engine:ForgetfulEngine
wrong = toy_engine:Completion
"""
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 4},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 1, "heads": 2},
    "reward": "reward.py:vowels",
    "rollout": {"n": 2, "max_tokens": 5, "verify_every": 1},
    "train": {"lr": 0.01},
    "steps": 2,
    "wait_limit_s": 120,
    "restarts": 0,
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with the toy engine in it, which is also the folder of the config."""
    info = tmp_path / "toy_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    shutil.copy(FILES / "toy_engine.py", tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(8)))
    (tmp_path / "reward.py").write_text(
        "def vowels(prompts, completions, **_): return [sum(map(c.count, 'aeiou ')) + 0.1 for c in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(site: Path, engine: str, **changes: Any) -> tuple[subprocess.CompletedProcess[str], list[dict[str, float]]]:
    """Trains as a user would, in an environment that has the package; returns what it printed, and its metrics."""
    rollout = CONFIG["rollout"] | {"engine": engine}
    path = site / f"{engine}.yaml"
    path.write_text(json.dumps({**CONFIG, **changes, "name": engine, "rollout": rollout}))
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "distflow", "run", str(path)]
    done = subprocess.run(
        command, env=environment, cwd=site, capture_output=True, text=True, timeout=300 * load_factor()
    )
    metrics = site / "runs" / engine / "metrics.jsonl"
    return done, [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_a_toy_engine_trains_what_the_built_in_one_does(site: Path) -> None:
    """Colocated on one worker: the weights of every step are synced into it, and verified."""
    curves = {}
    for engine in ("toy", "builtin"):
        done, curves[engine] = run(site, engine)
        assert done.returncode == 0, done.stderr
    assert len(curves["toy"]) == len(curves["builtin"]) == CONFIG["steps"]
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "response_length/mean"):
        toy, ours = ([row[name] for row in curves[e]] for e in ("toy", "builtin"))
        assert toy == pytest.approx(ours, rel=1e-3, abs=1e-5), name
    assert curves["toy"][1]["actor/grad_norm"] > 0


def test_an_engine_that_misses_a_weight_sync_ends_the_run(site: Path) -> None:
    """Generation and training on workers of their own."""
    placement = {
        "ranks": {"rollout": "0", "train": "1"},
        "default": {"ranks": "train"},
        "nodes": {"actor.generate": {"ranks": "rollout"}},
    }
    done, _ = run(site, "forgetful", placement=placement, workers=2)
    assert done.returncode != 0
    assert "the rollout engine does not have the trained weights of version 1" in done.stderr


@pytest.mark.usefixtures("site")
def test_the_config_knows_the_names_of_engines() -> None:
    assert {"builtin", "vllm", "toy"} < engines().keys()
    assert RolloutConfig(engine="toy").engine == "toy"
    with pytest.raises(ValueError, match="there is no engine 'toi'; did you mean 'toy'"):
        RolloutConfig(engine="toi")


def test_the_engines_of_the_package_need_no_metadata() -> None:
    assert (load_engine("builtin"), load_engine("vllm")) == (BuiltinEngine, VllmEngine)


@pytest.mark.usefixtures("site")
def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine: 'wrong' is not a subclass of .*RolloutEngine"):
        load_engine("wrong")


def test_what_an_engine_refuses_is_known_before_anything_is_loaded(site: Path) -> None:
    engine = load_engine("toy")
    with pytest.raises(ConfigError, match="superstitious"):
        engine.check(None, RolloutConfig(engine="toy", top_k=13), None, None)  # type: ignore[arg-type]
    path = site / "partial.yaml"
    path.write_text(json.dumps({**CONFIG, "rollout": {"engine": "toy", "staleness": 1, "partial": 2}}))
    with pytest.raises(ConfigError, match=r"rollout.partial: the engine 'toy' cannot be interrupted; use"):
        Program.load(path).plan(1)
