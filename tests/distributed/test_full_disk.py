"""A full disk ends no run but by its last checkpoint, whose error says what to do; a log ends none at all."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.checkpoint.store import list_checkpoints
from full import fill, small_disk
from warm import Ended, distflow_run
from warm_launch import Launch

STEPS = 12
FLOW = """
import resource

from distflow import node
from full import fill


@node(writes="score", type="inference")
def work(batch, ctx, full, free, limit):
    if limit:  # of each worker's files, which needs no rights
        if ctx.step in (full, free):
            soft = 0 if ctx.step == full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
    elif ctx.rank == 0 and ctx.step == full:
        fill(ctx.folder)
    elif ctx.rank == 0 and ctx.step == free:
        (ctx.folder / "filler").unlink()
    for i in range(40):
        ctx.metrics.log(f"a/metric/{i}", i)
    return [1.0] * len(batch)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, or a skipped test."""
    try:
        with small_disk(tmp_path / "disk", 1024):
            yield tmp_path / "disk"
    except PermissionError as e:
        pytest.skip(str(e))


def config(folder: Path, run_dir: Path, full: int = -1, free: int = -1, limit: bool = False, **changes: Any) -> Path:
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    (folder / "flow.py").write_text(FLOW)
    params = {"full": full, "free": free, "limit": limit}
    settings: dict[str, Any] = {
        "flow": [{"id": "work", "call": "flow.py:work", "deps": "data", "params": params}],
        "name": "test",
        "steps": STEPS,
        "data": {"files": "data.jsonl", "batch": 4},
        "checkpoint": {"every": 1, "keep": 2},
        "run_dir": str(run_dir),
        "wait_limit_s": 60,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_that_nothing_is_lost(run_dir: Path, ended: Ended, reason: str) -> None:
    assert ended.codes == [0, 0], ended.err
    assert [row["step"] for row in rows(run_dir)] == list(range(1, STEPS + 1))
    assert sum(row.get("record/failed_writes", 0) for row in rows(run_dir)) > 0
    for file in run_dir.glob("spans/*.jsonl"):
        assert {*range(1, STEPS + 1)} <= {json.loads(line)[2] for line in file.read_text().splitlines()}
    for file in run_dir.glob("samples/*.jsonl"):
        assert {json.loads(line)["step"] for line in file.read_text().splitlines()} == {*range(1, STEPS + 1)}
    assert json.loads((run_dir / "state.json").read_text())["state"] == "ended"
    assert list_checkpoints(run_dir / "checkpoints") == [STEPS, STEPS - 1]
    text = rf"{run_dir}/metrics.jsonl: is written again, after \d+ failed writes \({reason}\); nothing is lost\n"
    assert len(re.findall(text, ended.err)) == 1, ended.err


def test_a_disk_that_is_full_for_a_while_ends_no_run_and_costs_no_line(tmp_path: Path, disk: Path) -> None:
    run_dir, reason = disk / "run", "No space left on device"
    ended = distflow_run(config(tmp_path, run_dir, full=2, free=STEPS - 2), workers=2)
    check_that_nothing_is_lost(run_dir, ended, reason)
    text = f"{run_dir}/metrics.jsonl: cannot be written ({reason}); the run goes on and tries it again\n"
    assert ended.err.count(text) == 1, ended.err
    folder = run_dir / "checkpoints"
    what = rf"{folder}/step_\d+: could not be written: {folder}/\S+: {reason}"
    assert re.search(rf"{what}; make room in {folder}, where \d+ B are free; the run continues", ended.err)


def test_nor_does_a_limit_of_files(tmp_path: Path) -> None:
    """Also where nothing can be mounted. The messages are in a file, too, so those of the time in between are lost."""
    ended = distflow_run(config(tmp_path, tmp_path / "run", full=2, free=STEPS - 2, limit=True), workers=2)
    check_that_nothing_is_lost(tmp_path / "run", ended, "File too large")


def test_only_the_last_checkpoint_ends_it_without_a_restart_and_it_resumes(tmp_path: Path, disk: Path) -> None:
    run_dir = disk / "run"
    path = config(tmp_path, run_dir, full=4, workers=1, restarts=2)
    launch = Launch(path)
    assert launch.wait() == 1
    assert re.search(rf"step_{STEPS}: could not be written: .*: No space left on device; make room in", launch.err)
    assert "restart" not in launch.err
    assert "Traceback" not in launch.err
    newest = list_checkpoints(run_dir / "checkpoints")[0]
    assert newest < STEPS
    (run_dir / "filler").unlink()
    path = config(tmp_path, run_dir)
    ended = distflow_run(path, workers=1, resume="newest")
    assert ended.codes == [0], ended.err
    assert [row["step"] for row in rows(run_dir)] == list(range(1, STEPS + 1))


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


def test_logs_are_no_dependency_of_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = distflow_run(config(tmp_path, run_dir, steps=4), workers=1)
    assert first.codes == [0], first.err
    log = run_dir / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    damage = [b"7\n", b"{}\n", b"\xff\xfe\n", b'"step"\n', b"[" * 100_000 + b"\n"]
    log.write_bytes(b"".join([*lines[:2], *damage, *lines[2:], b'{"ste']))
    (run_dir / "suspicious.jsonl").write_bytes(b"\xff\n7\n")
    for name in ("config.yaml", "state.json", "plan.json", "spans/0.jsonl", "samples/0.jsonl"):
        if (run_dir / name).exists():
            (run_dir / name).write_bytes(b"\xff{")
    path = config(tmp_path, run_dir, steps=6, checkpoint={"every": 1, "keep": 2, "best": "a/metric/1"})
    ended: Ended = distflow_run(path, workers=1, resume="newest")
    assert ended.codes == [0], ended.err
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 7))
    assert f"{log}: 5 damaged lines, which are of no step, were removed\n" in ended.err


def test_shared_memory_that_is_full_is_done_without(tmp_path: Path) -> None:
    """In a mount namespace of its own, where /dev/shm is a file system that is full."""
    unshare = ["unshare", "--mount", "--map-root-user", "--user"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("there are no namespaces here")
    path = config(tmp_path, tmp_path / "run", steps=2, workers=2)
    script = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && { dd if=/dev/zero of=/dev/shm/full bs=4k 2>/dev/null; "
        f"exec {sys.executable} -m distflow run {path}; }}"
    )
    run = subprocess.run([*unshare, "sh", "-c", script], capture_output=True, text=True, env=environment())
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("/dev/shm: cannot be written (No space left on device); the workers' records are in") == 1
    assert "Traceback" not in run.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_the_filler_of_these_tests_fills(disk: Path) -> None:
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left"), open(disk / "other", "wb", buffering=0) as file:
        file.write(b"x")
    filler.unlink()
