"""The launcher starts a run again where that may help, and says why where it does not."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.observe.heartbeat import read_all
from distributed.test_run import orphans
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
        "wait_limit_s": 2,
    } | changes
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def told(launch: Launch) -> list[str]:
    """What the launcher said, in its order."""
    return re.findall(r"^distflow: (.*)", launch.err, re.M)


def finished(folder: Path) -> bool:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_killed_worker_is_started_again_with_all_others(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "kill"})
    launch = Launch(path)
    assert launch.ended() == 0, launch.err
    cause, restart = told(launch)
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGKILL .* in step 2, task 'work'", cause)
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert finished(tmp_path)
    assert not orphans(path)


def test_the_others_end_in_the_middle_of_whatever_they_do(tmp_path: Path) -> None:
    """Though the signal that ends them also asks for a last step, which has its own time."""
    launch = Launch(write_config(tmp_path, {"how": "kill alone"}, stop_limit_s=3000))
    assert launch.ended(28) == 0, launch.err  # after 30 s torchelastic would kill them
    cause, restart = told(launch)
    assert re.match(r"rank 1 \(pid \d+\) was killed by SIGKILL", cause)
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert finished(tmp_path)


def test_all_killed_at_once_and_a_stale_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    pointer = tmp_path / "run" / "checkpoints" / "latest"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({"step": 99}))
    launch = Launch(write_config(tmp_path, {"nap_s": 0.2}, workers=4))
    launch.until(lambda: "step 2/" in launch.out)
    for record in read_all(tmp_path / "run" / "workers", 4):
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
    assert launch.ended() == 0, launch.err
    cause, restart = told(launch)
    assert "was killed by SIGKILL" in cause
    assert restart == "restart 1 of 3 in 1 s, from the beginning"
    assert (tmp_path / "run" / "attempts.0").read_text() == "--"  # nobody was told to resume
    assert finished(tmp_path)


def test_no_more_restarts_than_allowed_each_from_the_checkpoint(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, {"how": "kill", "times": 9, "step": 3, "nap_s": 0.3}, restarts=2, checkpoint={"every": 1}
    )
    launch = Launch(config)
    assert launch.ended() == 1
    kill, first, again, second, last, end = told(launch)
    for line in (kill, again, last):
        assert "was killed by SIGKILL" in line
    assert re.fullmatch("restart 1 of 2 in 1 s, from step [123]", first)  # it is written behind the next step
    assert re.fullmatch("restart 2 of 2 in 2 s, from step [123]", second)
    assert end == "not started again: 2 restarts are used up (restarts)"
    assert (tmp_path / "run" / "attempts.0").read_text() == "-11"  # what the workers were told
    assert launch.out.count("resumed from") == 2
    assert launch.out.count("step 1/") == 1


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    """One that only the workers find."""
    launch = Launch(write_config(tmp_path), "steps=0")
    assert launch.ended() == 1
    (mistake,) = told(launch)
    assert "there is no `eval` section" in mistake


def test_an_exception_in_a_node_needs_a_checkpoint_to_be_tried_again(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"how": "raise"}))
    assert launch.ended() == 1
    assert told(launch) == ["rank 1, step 2, node 'work': ValueError: no luck"]


def test_the_same_exception_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"how": "raise", "times": 9, "nap_s": 0.3}, checkpoint={"every": 1})
    launch = Launch(config)
    assert launch.ended() == 1
    error, restart, same, end = told(launch)
    assert error == same == "rank 1, step 2, node 'work': ValueError: no luck"
    assert re.fullmatch("restart 1 of 3 in 1 s, from step [12]", restart)
    assert end == "not started again: twice at the same place"


@pytest.mark.parametrize(
    ("sig", "how", "sign"), [(signal.SIGTERM, "well", "step 2/"), (signal.SIGINT, "kill", "restart 1")]
)
def test_a_launcher_that_is_told_to_stop_does_not_start_again(
    tmp_path: Path, sig: signal.Signals, how: str, sign: str
) -> None:
    """Neither while workers run, nor between two attempts."""
    path = write_config(tmp_path, {"how": how, "times": 9, "nap_s": 0.1}, steps=1000)
    launch = Launch(path)
    launch.until(lambda: sign in launch.out + launch.err)
    os.kill(launch.pid, sig)
    assert launch.ended(10) == 128 + sig
    assert told(launch)[-1] == f"stopped by {sig.name}"
    assert not orphans(path)


def test_workers_that_were_told_to_end_are_not_started_again(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"nap_s": 0.1}, steps=1000))
    launch.until(lambda: "step 2/" in launch.out)
    record = read_all(tmp_path / "run" / "workers", 2)[1]
    assert record is not None
    os.kill(record.pid, signal.SIGTERM)
    assert launch.ended() == 128 + signal.SIGTERM
    kept, stopped = told(launch)
    assert "is kept" in kept
    assert stopped == "stopped by SIGTERM"


def test_a_worker_that_does_not_end_when_told_is_killed_after_the_limit(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"how": "deaf", "rank": 0}, workers=1, placement={}, steps=1000, stop_limit_s=1)
    launch = Launch(path)
    launch.until(lambda: "step 4/" in launch.out)
    began = time.monotonic()
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.ended(20) == 128 + signal.SIGTERM
    assert 1 < time.monotonic() - began < 10
    assert not orphans(path)
