"""The launcher restarts a run if that may help, and says why not if it does not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.checkpoint.store import list_checkpoints
from distflow.liveness.heartbeat import read_record
from distributed.test_run import orphans
from limits import load_factor
from warm import cli_main, distflow_run
from warm_launch import Launch

HERE = Path(__file__).parent


def write_config(folder: Path, params: dict[str, Any] | None = None, **changes: Any) -> Path:
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    config: dict[str, Any] = {
        "flow": [
            {"id": "work", "call": f"{HERE}/failing.py:work", "deps": "data", "params": params or {}},
            {"id": "use", "call": f"{HERE}/failing.py:use", "deps": "work"},
        ],
        "name": "test",
        "workers": 2,
        "steps": 4,
        "data": {"files": "data.jsonl", "batch": 4},
        "placement": {"ranks": {"last": "1"}, "nodes": {"use": {"ranks": "last"}}},
        "run_dir": str(folder / "run"),
        "wait_limit_s": 60,
    } | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def messages(launch: Launch) -> list[str]:
    """Returns what was logged, in order, but for lines of workers that have resumed."""
    return re.findall(r"^distflow: (?!resumed)(.*)", launch.err, re.M)


def finished(folder: Path, steps: int = 4) -> bool:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


def test_all_workers_are_restarted_after_one_was_killed(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "kill"})
    launch = Launch(path)
    assert launch.wait() == 0, launch.err
    cause, restart = messages(launch)
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL .* in step 2, task 'work'", cause)
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert finished(tmp_path)
    assert not orphans(path)


def test_the_other_workers_end_in_the_middle_of_a_node(tmp_path: Path) -> None:
    """Although the signal that ends them also asks for a last step, which has its own time limit."""
    launch = Launch(write_config(tmp_path, {"how": "kill alone"}, stop_limit_s=3000))
    assert launch.wait(28) == 0, launch.err  # after 30 s torchelastic would kill them
    cause, restart = messages(launch)
    assert re.match(r"rank 1 \(pid \d+\) was killed by SIGKILL", cause)
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert finished(tmp_path)


def test_a_restart_does_not_use_the_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    pointer = tmp_path / "run" / "checkpoints" / "latest"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"step": 99}))
    launch = Launch(write_config(tmp_path, {"nap_s": 0.2}, workers=4))
    launch.wait_until(lambda: "step 2/" in launch.out)
    for rank in range(4):
        record = read_record(tmp_path / "run" / "workers", rank)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
    assert launch.wait() == 0, launch.err
    kept, cause, restart = messages(launch)
    assert kept.startswith(f"the earlier run in {tmp_path / 'run'} is kept in ")
    assert "was killed by SIGKILL" in cause
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert (tmp_path / "run" / "attempts.0").read_text() == "--"  # no worker was asked to resume
    assert finished(tmp_path)


def test_no_more_restarts_than_allowed_each_from_the_checkpoint(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, {"how": "kill", "times": 9, "step": 3, "nap_s": 0.3}, restarts=2, checkpoint={"every": 1}
    )
    launch = Launch(config)
    assert launch.wait() == 1
    kill, first, again, second, last, end = messages(launch)
    for line in (kill, again, last):
        assert "was killed by SIGKILL" in line
    assert re.fullmatch("restart 1 of 2 in 1 s, from step [123]", first)  # it is written while the next step runs
    assert re.fullmatch("restart 2 of 2 in 2 s, from step [123]", second)
    assert end == "not restarted: 2 restarts are used up (restarts)"
    assert (tmp_path / "run" / "attempts.0").read_text() == "-rr"  # what the workers were asked to do
    assert launch.err.count("resumed from") == 2
    assert launch.out.count("step 1/") == 1


def test_workers_that_torchrun_restarts_continue_from_the_newest_checkpoint(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "kill", "step": 3, "nap_s": 0.3}, checkpoint={"every": 1})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, "-m", "distflow", "run", str(path)]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else PyTorch reuses the first one's store
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120 * load_factor())
    assert done.returncode == 0, done.stderr
    assert re.search(r"^distflow: resumed from .*/step_[123]$", done.stderr, re.M), done.stderr
    assert done.stdout.count("step 1/") == 1
    assert finished(tmp_path)


def restarted_on_one_host(words: list[str]) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    cli_main(words)


def test_all_workers_resume_if_torchrun_counts_a_restart_on_one_host_only(tmp_path: Path) -> None:
    """It does not count where it ended the workers itself, because those of another host had failed."""
    path = write_config(tmp_path, checkpoint={"every": 1})
    assert Launch(path, "steps=2").wait() == 0
    ended = distflow_run(path, workers=2, main=restarted_on_one_host)
    assert ended.codes == [0, 0], ended.err
    assert re.search(r"^distflow: resumed from .*/step_2$", ended.err, re.M), ended.err
    assert finished(tmp_path)


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    """One that only the workers find."""
    launch = Launch(write_config(tmp_path), "steps=0")
    assert launch.wait() == 1
    (mistake,) = messages(launch)
    assert "there is no `eval` section" in mistake


def test_after_an_exception_in_a_node_there_is_no_restart_without_a_checkpoint(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"how": "raise"}))
    assert launch.wait() == 1
    assert messages(launch) == ["rank 1, step 2, node 'work': ValueError: no luck"]


def test_after_the_same_exception_twice_there_is_no_restart(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"how": "raise", "times": 9, "nap_s": 0.3}, checkpoint={"every": 1})
    launch = Launch(config)
    assert launch.wait() == 1
    error, restart, same, end = messages(launch)
    assert error == same == "rank 1, step 2, node 'work': ValueError: no luck"
    assert re.fullmatch("restart 1 of 3 in 1 s, from step [12]", restart)
    assert end == "not restarted: it failed twice at the same place"


@pytest.mark.parametrize(
    ("sig", "how", "sign"), [(signal.SIGTERM, "well", "step 2/"), (signal.SIGINT, "kill", "restart 1")]
)
def test_a_launcher_that_is_asked_to_stop_does_not_restart(
    tmp_path: Path, sig: signal.Signals, how: str, sign: str
) -> None:
    """Neither while workers run, nor between two attempts."""
    path = write_config(tmp_path, {"how": how, "times": 9, "nap_s": 0.1}, steps=1000)
    launch = Launch(path)
    launch.wait_until(lambda: sign in launch.out + launch.err)
    os.kill(launch.pid, sig)
    assert launch.wait(10) == 128 + sig
    assert messages(launch)[-1].startswith(f"stopped by {sig.name}; ")
    assert not orphans(path)


def test_workers_that_were_asked_to_end_are_not_restarted(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"nap_s": 0.1}, steps=1000))
    launch.wait_until(lambda: "step 2/" in launch.out)
    record = read_record(tmp_path / "run" / "workers", 1)
    assert record is not None
    os.kill(record.pid, signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM
    saved, stopped = messages(launch)
    assert "is saved" in saved
    step = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    command = f"distflow run {tmp_path / 'config.yaml'} --workers=2 --resume"
    assert stopped == f"stopped by SIGTERM; continue from step {step}: {command}"


def test_a_worker_that_does_not_end_on_request_is_killed_after_the_limit(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "deaf", "rank": 0}, workers=1, placement={}, steps=1000, stop_limit_s=1)
    launch = Launch(path)
    launch.wait_until(lambda: "step 4/" in launch.out)
    began = time.monotonic()
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.wait(20) == 128 + signal.SIGTERM
    assert 1 < time.monotonic() - began < 10
    assert not orphans(path)


def test_ctrl_c_ends_the_run_after_its_step_and_says_how_to_resume(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"nap_s": 0.1}, steps=1000)
    launch = Launch(path, "seed=3")
    launch.wait_until(lambda: "step 2/" in launch.out)
    os.kill(launch.pid, signal.SIGINT)
    assert launch.wait() == 128 + signal.SIGINT
    again, saved, stopped = messages(launch)
    assert "press Ctrl-C again" in again
    step = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    assert saved.startswith(f"stopped on request after step {step} of 1000, which is saved")
    assert stopped == f"stopped by SIGINT; continue from step {step}: distflow run {path} seed=3 --workers=2 --resume"
    assert finished(tmp_path, step)
    assert not orphans(path)


def test_a_second_ctrl_c_ends_the_workers_at_once(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "kill alone", "rank": -1}, steps=1000, stop_limit_s=3000)
    launch = Launch(path)  # in step 2 all workers wait for ever
    launch.wait_until(lambda: "step 1/" in launch.out)
    os.kill(launch.pid, signal.SIGINT)
    launch.wait_until(lambda: "press Ctrl-C again" in launch.err)
    os.kill(launch.pid, signal.SIGINT)
    assert launch.wait(20) == 128 + signal.SIGINT
    assert messages(launch)[-1] == "stopped by SIGINT; no step was saved"
    assert not orphans(path)
