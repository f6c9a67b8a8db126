"""A folder has one run, whoever launches; no worker outlives its launcher; no jump of a clock ends or hides a run."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distflow import cli
from distflow.liveness.heartbeat import read_record
from distflow.util.owner import Owner
from distflow.util.parent import process_exists
from distributed.test_restart import finished, messages, write_config
from limits import wait_until
from warm import distflow_run
from warm_launch import Launch


def wait_for_end(pids: list[int]) -> None:
    wait_until(lambda: not any(map(process_exists, pids)), 120, lambda: f"{pids} go on")


def test_workers_of_another_launcher_are_refused_where_a_run_lives(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    with Owner(tmp_path / "run"):
        ended = distflow_run(path, workers=2)
    assert ended.codes[0] == 1
    assert re.search(rf"another run is writing to \S+, on \S+ \(pid {os.getpid()}, since .*; wait for it", ended.err)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert distflow_run(path, workers=2).codes == [0, 0]
    assert finished(tmp_path)


@pytest.mark.parametrize(
    ("how", "message"), [("steal", r"has lost \S+ to another one, on elsewhere \(pid 7"), ("empty", "was emptied or")]
)
def test_a_run_that_lost_its_folder_ends_before_it_writes(tmp_path: Path, how: str, message: str) -> None:
    path = write_config(tmp_path, {"how": how, "rank": 0}, checkpoint={"every": 1})
    ended = distflow_run(path, workers=2)
    assert ended.codes[0] == 1, ended.err
    assert re.search(message, ended.err), ended.err
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1] if how == "steal" else True
    assert how == "steal" or not metrics.exists()


def test_a_launcher_does_not_restart_in_a_folder_that_was_emptied(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"how": "empty", "rank": 0}))
    assert launch.wait() == 1, launch.err
    assert "was emptied or replaced while the run wrote to it" in launch.err
    assert "restart 1" not in launch.err
    assert "distflow show" not in launch.out


def test_workers_end_if_their_launcher_is_killed_while_they_start(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=100_000)
    launcher = subprocess.Popen([sys.executable, "-m", "distflow", "run", str(path)], stderr=subprocess.PIPE)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    while len(pids := [int(pid) for pid in children.read_text().split()]) < 2:
        assert launcher.poll() is None
        time.sleep(0.001)
    launcher.kill()
    launcher.communicate()
    wait_for_end(pids)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_workers_end_if_the_agent_of_torchrun_is_killed(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"nap_s": 0.1}, steps=100_000)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with open(tmp_path / "out", "w") as out:
        agent = subprocess.Popen([*torchrun, "-m", "distflow", "run", str(path)], stdout=out, stderr=out)
    try:
        while "step 2/" not in (tmp_path / "out").read_text():
            assert agent.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.05)
        pids = [int(p) for p in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    finally:
        agent.kill()
        agent.wait()
    assert len(pids) >= 2
    wait_for_end(pids)
    said = (tmp_path / "out").read_text()
    assert re.search(rf"rank [01] on \S+ ends, as what launched it is gone: torchrun, pid {agent.pid}", said), said
    with Owner(tmp_path / "run"):
        pass


def main_with_jumping_clock(words: list[str]) -> None:
    """Runs with a wall clock that is off by what the file `jump` beside the config says, also in forks."""
    now, jump = time.time, Path(words[1]).with_name("jump")
    time.time = lambda: now() + (float(jump.read_text()) if jump.exists() else 0)
    cli.main(words)


def set_clock(folder: Path, seconds: float) -> None:
    (folder / "jump.part").write_text(str(seconds))
    (folder / "jump.part").rename(folder / "jump")


def waits(folder: Path, rank: int, step: int) -> bool:
    record = read_record(folder / "run" / "workers", rank)
    return record is not None and record.step >= step and bool(record.waits_for)


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_healthy_run_does_not_notice_that_the_clock_was_set(tmp_path: Path, jump: float) -> None:
    """Rank 0 waits for rank 1 for most of each step."""
    launch = Launch(
        write_config(tmp_path, {"nap_s": 0.3, "slow": 1}, restarts=0, wait_limit_s=30), main=main_with_jumping_clock
    )
    launch.wait_until(lambda: waits(tmp_path, 1, 2) or waits(tmp_path, 0, 2))
    set_clock(tmp_path, jump)
    assert launch.wait() == 0, launch.err
    assert launch.err == ""
    assert finished(tmp_path)


def test_a_stuck_run_ends_although_the_clock_was_set_back(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"how": "hang", "rank": 0}, restarts=0, wait_limit_s=3)
    launch = Launch(config, main=main_with_jumping_clock)
    launch.wait_until(lambda: waits(tmp_path, 1, 2))
    set_clock(tmp_path, -3600)
    assert launch.wait(120) == 1
    assert "who waits for whom" in launch.err


class _SignallingStream(io.TextIOWrapper):
    """Is interrupted while it writes of a restart."""

    def write(self, text: str) -> int:
        if "restart 1" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def main_with_signalling_stream(words: list[str]) -> None:
    sys.stderr = _SignallingStream(os.fdopen(os.dup(2), "wb"), write_through=True)
    cli.main(words)


def test_ctrl_c_is_not_lost_while_a_line_is_logged(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "kill", "rank": 0}, workers=1, placement={})
    launch = Launch(path, main=main_with_signalling_stream)
    assert launch.wait() == 128 + signal.SIGINT, launch.err
    assert messages(launch)[-1] == "stopped by SIGINT; no step was saved"
    assert not (tmp_path / "run" / "checkpoints").exists()
