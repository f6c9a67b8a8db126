"""A worker that is stopped from outside while the others sit in a collective of the model."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.checkpoint import writer
from distflow.liveness.heartbeat import read_record
from warm import cli_main
from warm_launch import Launch

LIMIT_S, STEPS = 3.0, 30


def write_config(folder: Path, **changes: Any) -> Path:
    rows = [json.dumps({"prompt": f"count to {i}", "response": " ".join(map(str, range(i)))}) for i in range(4)]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    config: dict[str, Any] = {
        "flow": "sft",
        "workers": 2,
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "pairs.jsonl", "batch": 4},
        "steps": STEPS,
        "run_dir": str(folder / "run"),
        "wait_limit_s": LIMIT_S,
    } | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def main_with_a_slow_disk(words: list[str]) -> None:
    write = writer._write_role

    def slowly(*args: Any) -> bytes:
        time.sleep(6)
        return write(*args)

    writer._write_role, writer._RATE = slowly, 1 << 10  # type: ignore[assignment]
    cli_main(words)


def test_a_last_checkpoint_has_the_time_that_its_size_takes(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=100_000, stop_limit_s=2, wait_limit_s=60)
    launch = Launch(path, main=main_with_a_slow_disk)
    launch.wait_until(lambda: "step 2/" in launch.out)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.wait(60) == 128 + signal.SIGTERM, launch.err
    assert "which is saved" in launch.err


def stop(launch: Launch, folder: Path, rank: int) -> None:
    """Stops a rank while it updates the model in some later step."""

    def stopped() -> bool:
        record = read_record(folder / "run" / "workers", rank)
        if record is None or record.step <= 2 or record.task != "actor.update":
            return False
        os.kill(record.pid, signal.SIGSTOP)
        return True

    launch.wait_until(stopped)


@pytest.mark.parametrize(("restarts", "rank"), [(0, 0), (1, 1)])
def test_a_worker_stopped_inside_the_update_is_named(tmp_path: Path, restarts: int, rank: int) -> None:
    launch = Launch(write_config(tmp_path, restarts=restarts))
    stop(launch, tmp_path, rank)
    began = time.monotonic()
    launch.wait_until(lambda: "distflow: " in launch.err or launch.has_ended)
    assert time.monotonic() - began < LIMIT_S + 12
    assert launch.wait() == 1 - restarts, launch.err
    assert re.search(r"a worker has (had no heartbeat for|waited) more than 3 s", launch.err), launch.err
    where = r"its process is stopped; it was in step \d+, 'actor.update'"
    assert re.search(rf"^rank {rank} has had no heartbeat for \d+ s: {where}", launch.err, re.M), launch.err
    if restarts:
        assert "distflow: restart 1 of 1 in 1 s, from the beginning\n" in launch.err
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == STEPS
    else:
        assert launch.err.count("distflow: ") == 1


def test_several_workers_stopped_on_a_host_are_all_named_and_end(tmp_path: Path) -> None:
    """Also the one whose watcher is stopped as well; they are continued, so that their launcher need not wait."""
    launch = Launch(write_config(tmp_path, restarts=0, workers=4, steps=3000))
    pids = {}

    def running() -> bool:
        for rank in range(4):
            if (record := read_record(tmp_path / "run" / "workers", rank)) and record.step > 2:
                pids[rank] = record.pid
        return len(pids) == 4

    launch.wait_until(running)
    for rank in (1, 2, 3):
        os.kill(pids[rank], signal.SIGSTOP)
    assert launch.wait() == 1, launch.err
    for rank in (1, 2, 3):
        assert re.search(
            rf"^rank {rank} has had no heartbeat for \d+ s: its process is stopped; it", launch.err, re.M
        ), launch.err
    assert "is gone" not in launch.err
