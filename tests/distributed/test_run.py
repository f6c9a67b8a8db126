"""`distflow run` with real workers: what it writes, and how it ends when something fails."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow import __version__
from warm import cli_main, distflow_run
from warm_launch import Launch

HERE = Path(__file__).parent


def write_config(folder: Path, **changes: Any) -> Path:
    """Judge and use are on rank sets of their own, so that every step has moves between the workers."""
    rows = [json.dumps({"prompt": f"p{i}"}) for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    config: dict[str, Any] = {
        "flow": [
            {"id": "work", "call": f"{HERE}/nodes.py:work", "deps": "data"},
            {"id": "judge", "call": f"{HERE}/nodes.py:judge", "deps": "work"},
            {"id": "use", "call": f"{HERE}/nodes.py:use", "deps": "judge"},
        ],
        "name": "test",
        "workers": 2,
        "steps": 3,
        "data": {"files": "data.jsonl", "batch": 4},
        "placement": {"ranks": {"last": "1"}, "nodes": {"use": {"ranks": "last"}}},
        "run_dir": str(folder / "run"),
        "wait_limit_s": 60,
        "restarts": 0,
    } | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def misbehaving(folder: Path, how: str, **changes: Any) -> Path:
    path = write_config(folder, **changes)
    config = yaml.safe_load(path.read_text())
    config["flow"][1]["params"] = {"how": how}
    path.write_text(yaml.safe_dump(config))
    return path


def run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    launch = Launch(path, *words)
    code = launch.wait(90)
    assert not orphans(path)
    return subprocess.CompletedProcess([], code, launch.out, launch.err)


def orphans(path: Path) -> list[int]:
    """Returns processes that were started for this config and are still running: they have one of its files open."""
    pids = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if proc.name != str(os.getpid()) and any(
                os.readlink(fd).startswith(str(path.parent)) for fd in (proc / "fd").iterdir()
            ):
                pids.append(int(proc.name))
        except OSError:
            continue
    return pids


def test_a_run_writes_metrics_of_every_step(tmp_path: Path) -> None:
    path = write_config(tmp_path, roles={"counter": {"call": f"{HERE}/nodes.py:Counter", "args": {"start": 100}}})
    config = yaml.safe_load(path.read_text())
    config["flow"].append({"id": "count", "call": "counter.count", "deps": ["data"]})
    path.write_text(yaml.safe_dump(config))
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 3/3 ", done.stdout, re.M)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines] == [1, 2, 3]
    assert [m["use/samples"] for m in lines] == [4, 4, 4]
    assert [m["counter/value"] for m in lines] == [102, 104, 106]
    for name in (
        "timing_s/judge",
        "timing_max_s/step",
        "data/bytes_sent",
        "data/bytes_local",
        "data/bytes_received_max",
    ):
        assert all(name in m for m in lines), name
    assert all(m["data/bytes_sent_max"] > 0 for m in lines)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (resolved["steps"], resolved["data"]["batch"], resolved["rollout"]["n"], resolved["workers"]) == (3, 4, 8, 2)
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["distflow"] == __version__
    assert {"torch", "transformers", "numpy", "python"} <= versions.keys()

    again = run(path, "steps=1")  # the log of the first run is kept
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "run" / "earlier/1/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1, step 1, node 'judge': ValueError: the judge is confused\n +File .*nodes.py"),
        ("kill", r"rank 1 \(pid \d+\) was killed by SIGKILL .* in step 1, task 'judge'"),
        ("exit", r"rank 1 \(pid \d+\) exited with 7 in step 1, task 'judge'"),
        ("short", r"rank 1, step 1, node 'judge': field 'c': has 1 values for 2 samples"),
        ("tuple", r"rank 1, step 1, node 'judge': field 'c': sample 0 holds a tuple"),
        ("silent", r"rank 1, step 1, node 'judge': returned no field 'c', which 'use' reads"),
    ],
)
def test_a_failure_of_one_worker_ends_all_with_its_cause(tmp_path: Path, how: str, message: str) -> None:
    done = run(misbehaving(tmp_path, how))
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("distflow:") == 1  # the cause, once


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sleep", r"rank 1 waits for no other rank: it is busy with 'judge' of step 1"),
        ("stop", r"rank 1 has had no heartbeat"),
    ],
)
def test_a_stuck_run_ends_by_itself_and_says_who_waits_for_whom(tmp_path: Path, how: str, message: str) -> None:
    done = run(misbehaving(tmp_path, how, wait_limit_s=3))
    assert done.returncode == 1
    assert re.search(r"0 +\S+:\d+ +1 +move m\d \(c\) +\d+ s +1 ", done.stderr), done.stderr
    assert re.search(r"1 +\S+:\d+ +1 +judge +\d+ s +none", done.stderr)
    assert re.search(message, done.stderr)
    if how == "sleep":
        assert "time.sleep(10_000)" in done.stderr  # where it hangs


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_the_launcher_leaves_no_process_behind(tmp_path: Path, sig: signal.Signals) -> None:
    path = write_config(tmp_path, steps=100_000)
    launch = Launch(path)
    launch.wait_until(lambda: "step 1/" in launch.out)
    os.kill(launch.pid, sig)
    assert launch.wait(30) == (-sig if sig == signal.SIGKILL else 128 + sig)
    if sig != signal.SIGKILL:
        *_, saved, last = launch.err.splitlines()
        assert "which is saved" in saved
        assert last.startswith(f"distflow: stopped by {sig.name}; continue from step ")
    for _ in range(50):
        if not orphans(path):
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {orphans(path)}")


def with_seed_of_its_own(words: list[str]) -> None:
    cli_main([*words, "seed=" + os.environ["RANK"]])


def test_workers_with_different_configs_do_not_start(tmp_path: Path) -> None:
    """As when one host has an older config."""
    ended = distflow_run(write_config(tmp_path), workers=2, main=with_seed_of_its_own)
    assert 0 not in ended.codes
    different = r"the workers have different configs: ranks 0 \(on \S+\) have \w{12}, ranks 1 \(on \S+\) have \w{12}"
    assert re.search(different, ended.err), ended.err


def test_a_bad_row_is_reported_by_file_and_line(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    rows = (tmp_path / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join([*rows[:5], '{"prompt": "p5"', *rows[6:]]))
    done = run(path)
    assert done.returncode == 1
    assert re.search(r"data.jsonl:6: .*is not a JSON object on one line .*data.on_bad_row: skip", done.stderr), (
        done.stderr
    )
    done = run(path, "data.on_bad_row=skip")
    assert done.returncode == 0, done.stderr
    assert re.search(r"skipped 1 bad rows\n +\S*data.jsonl:6: ", done.stdout), done.stdout


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=100_000)
    first = Launch(path)
    first.wait_until(lambda: "step 1/" in first.out)
    second = Launch(path)
    assert second.wait() == 2
    assert "another run is writing to" in second.err
    os.kill(first.pid, signal.SIGTERM)
    first.wait(30)
