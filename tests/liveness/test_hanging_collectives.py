"""A collective that not all ranks enter is noticed by a rank that is in it, and named."""

import json
import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from distflow.errors import DistflowError, StuckError
from distflow.liveness.beacon import Beacon
from distflow.liveness.collectives import _BUFFER, oldest_unfinished, record_collectives
from distflow.liveness.heartbeat import Heartbeat
from distflow.liveness.watchdog import Watchdog
from limits import TimeLimit
from spawn import spawn
from warm_launch import Launch


def enter_alone(rank: int) -> tuple[str, tuple[int, ...], str]:
    """Returns what rank 0, which alone enters a collective, knows of it; and the error of its watchdog."""
    record_collectives()
    dist.barrier()
    group = dist.new_group([0, 1], group_desc="dp of dp2×tp1")
    dist.all_reduce(torch.ones(2), group=group)
    limit = TimeLimit(60)
    while oldest_unfinished():  # what has ended is noted a moment later
        assert limit.left() > 0
        time.sleep(0.01)
    heartbeat, errors = Heartbeat(rank), queue.SimpleQueue[DistflowError]()
    if rank == 0:
        stuck = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),), kwargs={"group": group}, daemon=True)
        stuck.start()
        beacon = Beacon(rank, 2, "127.0.0.1")
        beacon.connect("secret", lambda r: beacon.address)
        watchdog = Watchdog(heartbeat, beacon, 0.5, errors.put)
        heartbeat.start_task(1, "actor.update")  # in which it waits longer
        heartbeat.start_task(2, "actor.update")
        watchdog.start()
        error = errors.get(timeout=60)
        watchdog._stop.set()
        found = oldest_unfinished()
        assert isinstance(error, StuckError)
        assert found is not None
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(3), group=group)
        return "", (), ""
    stuck.join(60)
    return str(found), found.ranks if found else (), str(error)


def test_a_worker_in_a_collective_of_a_model_knows_for_whom_it_waits() -> None:
    (name, ranks, error), _ = spawn(2, enter_alone)
    assert name == "gloo:all_reduce (dp of dp2×tp1)"
    assert ranks == (0, 1)
    assert "more than 0.5 s for others (wait_limit_s): rank 0 in gloo:all_reduce (dp of dp2×tp1)" in error
    assert "actor.update: gloo:all_reduce (dp of dp2×tp1)" in error


def test_torch_is_told_to_record_them_unless_the_user_has_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_BUFFER, raising=False)
    record_collectives()
    assert int(os.environ[_BUFFER]) > 0
    monkeypatch.setenv(_BUFFER, "7")
    record_collectives()
    assert os.environ[_BUFFER] == "7"


LOSS = """
import os, pathlib, time
from distflow.algo.losses import policy

def stops_once(tokens, **constants):
    mark = pathlib.Path(__file__).with_name("stopped")
    scored = mark.with_name("scored")
    second = scored.exists() and len(scored.read_text()) > 8  # step; it is also tried before the run
    if second and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        time.sleep(10_000)
    return policy(tokens, **constants)
"""
REWARD = """
import pathlib

def length(solution_str):
    with open(pathlib.Path(__file__).with_name("scored"), "a") as file:
        file.write(".")
    return float(len(solution_str))
"""
FLOW = """
from distflow import flow
from distflow.flows.nodes import group_advantage

@flow
def stops(prompts, actor, reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, group_advantage(reward.score(rollout)), loss="loss.py:stops_once", clip=0.2)
"""
CONFIG: dict[str, Any] = {
    "flow": "flow.py:stops",
    "workers": 2,
    "steps": 3,
    "restarts": 1,
    "wait_limit_s": 10,
    "data": {"files": "data.jsonl", "batch": 4},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 4},
    "reward": "reward.py:length",
}


def test_a_rank_that_does_not_enter_a_collective_is_named_and_the_run_restarts(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(8)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"run_dir": str(tmp_path / "run")}))
    launch = Launch(tmp_path / "config.yaml")
    assert launch.wait(200) == 0, launch.err
    waits = r"a worker has waited more than 10 s for others \(wait_limit_s\): rank 0 in gloo:\w+ \(dp of dp2×tp1\); who"
    assert re.search(waits, launch.err), launch.err
    assert "rank 1 waits for no other rank: it is busy with 'actor.update' of step 2, at:" in launch.err
    assert "time.sleep(10_000)" in launch.err
    assert "restart 1 of 1" in launch.err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
