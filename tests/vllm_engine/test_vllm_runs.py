"""Runs that generate with vLLM while others train: as with the built-in engine, and after an engine was killed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm`")

from distributed.test_staleness import CONFIG, FLOW, REWARD, rows, trained
from warm import distflow_run
from warm_launch import Launch

STEPS = 4
KILL = """
import os
import signal

from distflow.liveness.heartbeat import read_record


def kill_the_engine(ctx):
    if ctx.step == 3 and (ctx.folder / "kill").exists():
        (ctx.folder / "kill").unlink()
        os.kill(read_record(ctx.folder / "workers", 0).pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    prompts = [{"prompt": f"{'so ' * (i % 3)}what is {i} + {i * i % 17}?", "row": i} for i in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    note = "def note(batch, ctx):\n"
    assert FLOW.count(note) == 1
    (folder / "flow.py").write_text(KILL + FLOW.replace(note, note + "    kill_the_engine(ctx)\n"))
    (folder / "reward.py").write_text(REWARD)
    return folder


def write_config(folder: Path, name: str, engine: str = "vllm") -> tuple[Path, Path]:
    """Generates on rank 0 with the weights of the step before, in chunks, and trains on rank 1."""
    rollout = {"n": 2, "max_tokens": 8, "staleness": 1, "chunk": 2, "engine": engine, "kv_cache_gb": 0.05}
    changes: dict[str, Any] = {
        "model": {"arch": "qwen2", "hidden": 128, "layers": 1, "heads": 4, "kv_heads": 2},
        "rollout": rollout | {"max_sequences": 8, "verify_every": 1},
        "steps": STEPS,
        "checkpoint": {"every": 1, "keep": 10},
        "placement": {
            "ranks": {"rollout": "0", "train": "1"},
            "default": {"ranks": "train"},
            "nodes": {"actor.generate": {"ranks": "rollout"}},
        },
        "run_dir": str(folder / name),
        "wait_limit_s": 240,
    }
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump({k: v for k, v in CONFIG.items() if k != "eval"} | changes))
    (run_dir / "trained").mkdir(parents=True)
    return path, run_dir


@pytest.fixture(scope="module")
def complete(folder: Path) -> Path:
    path, run_dir = write_config(folder, "complete")
    ended = distflow_run(path, workers=2, timeout_s=300)
    assert ended.codes == [0, 0], ended.err
    return run_dir


def test_a_stale_run_in_chunks_is_that_of_the_built_in_engine(folder: Path, complete: Path) -> None:
    path, run_dir = write_config(folder, "builtin", "builtin")
    ended = distflow_run(path, workers=2, timeout_s=300)
    assert ended.codes == [0, 0], ended.err
    assert trained(complete) == trained(run_dir)
    for ours, theirs in zip(rows(complete), rows(run_dir), strict=True):
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert ours.get(key) == pytest.approx(theirs.get(key), rel=1e-3, abs=1e-5), (key, ours["step"])
        assert ours.get("rollout/staleness") == theirs.get("rollout/staleness")
    assert max(row.get("rollout/mismatch_max", 0.0) for row in rows(complete)[:2]) < 1e-4


def test_a_killed_engine_is_reported_and_the_run_continues_to_the_bit(folder: Path, complete: Path) -> None:
    path, run_dir = write_config(folder, "killed")
    (run_dir / "kill").touch()
    launch = Launch(path, "workers=2")
    assert launch.wait(300) == 0, launch.err
    cause, restart = re.findall(r"^distflow: (?!resumed)(.*)", launch.err, re.M)
    assert re.fullmatch(r"rank 0 \(pid \d+\) was killed by SIGKILL .* in step [34], task '.*'", cause), cause
    assert re.fullmatch("restart 1 of 3 in 1 s, from (step [123]|the beginning)", restart)
    assert trained(run_dir) == trained(complete)
    curves = [[(row["step"], row.get("actor/loss")) for row in rows(path)] for path in (run_dir, complete)]
    assert curves[0] == curves[1]
