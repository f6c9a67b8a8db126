"""How the one cause of a failure is found, and when a run is restarted, without processes."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distflow.errors import CheckpointError, ConfigError, NodeError, PeerLostError, StuckError
from distflow.liveness.failures import Failure, Kind, find_cause, read_failures, why_not_restart
from distflow.liveness.heartbeat import Heartbeat


def exits(**codes: int) -> Any:
    """Exit codes by rank, as torchelastic has them: exits(_1=-9)."""
    ranks = {int(name[1:]): code for name, code in codes.items()}
    return {r: SimpleNamespace(local_rank=r, pid=1000 + r, exitcode=code) for r, code in ranks.items()}


def test_causes_come_before_stuck_waits_and_lost_peers(tmp_path: Path) -> None:
    Failure("peer_lost", "lost one of ranks 0-2", rank=0).write(tmp_path)
    Failure("stuck", "who waits for whom", rank=2).write(tmp_path)
    Failure("node", "node 'judge' raised", step=3, rank=1).write(tmp_path)
    assert [f.rank for f in read_failures(tmp_path)] == [1, 2, 0]
    assert find_cause(tmp_path, exits(_0=1, _1=1, _2=1)) == Failure("node", "node 'judge' raised", 3)


@pytest.mark.parametrize(
    ("error", "step", "kind"),
    [
        (ConfigError("x"), -1, "user_error"),
        (ConfigError("x"), 2, "node"),
        (NodeError("x"), 0, "node"),
        (StuckError("x"), 0, "stuck"),
        (PeerLostError("x"), 0, "peer_lost"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), 0, "peer_lost"),
        (ValueError("x"), -1, "exception"),
    ],
)
def test_the_kind_of_a_failure_follows_from_the_error(error: Exception, step: int, kind: Kind) -> None:
    assert Failure.of(error, 3, step).kind == kind


def test_only_an_unexpected_error_has_a_traceback() -> None:
    with pytest.raises(ValueError, match="oops") as e:
        raise ValueError("oops")
    assert re.match(r"rank 3: ValueError: oops\n +File .*test_failures.py", Failure.of(e.value, 3, 0).message)
    assert Failure.of(ConfigError("steps: wrong"), 3, -1).message == "steps: wrong"


def test_a_lost_peer_needs_no_frames_of_the_one_that_noticed() -> None:
    error = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer. This may mean much")
    assert Failure.of(error, 3, 0).message == "rank 3 has lost another worker: Connection closed by peer"


def test_a_worker_that_died_without_a_report_is_named_with_its_task(tmp_path: Path) -> None:
    Heartbeat(1, tmp_path).start_task(4, "judge")
    Failure("peer_lost", "lost rank 1", rank=0).write(tmp_path)
    cause = find_cause(tmp_path, exits(_0=1, _1=-signal.SIGKILL, _2=-signal.SIGTERM))
    assert (cause.kind, cause.step) == ("died", 4)
    assert cause.message == (
        "rank 1 (pid 1001) was killed by SIGKILL (by hand, or by the system for lack of memory) in step 4, task 'judge'"
        "\n  noticed by rank 0: lost rank 1"
    )
    assert find_cause(tmp_path, exits(_5=7)).message.startswith("rank 5 (pid 1005) exited with 7 before it started")


def test_workers_that_all_ended_on_request_were_stopped(tmp_path: Path) -> None:
    code = 128 + signal.SIGTERM
    assert find_cause(tmp_path, exits(_0=code, _1=code)).kind == "stopped"
    assert find_cause(tmp_path, exits(_0=code, _1=-signal.SIGTERM)).kind == "died"


def test_a_restart_needs_a_failure_that_may_not_happen_again() -> None:
    node, lost = Failure("node", "raised", 3), Failure("died", "killed", 3)
    assert why_not_restart(Failure("user_error", "typo"), None, 2)
    full = Failure.of(CheckpointError("step_4: could not be written: No space left on device"), 0, 4)
    assert why_not_restart(full, None, 2)
    assert why_not_restart(node, None, None)
    assert why_not_restart(node, None, 2) is None
    assert why_not_restart(node, node, 2)
    assert why_not_restart(Failure("node", "raised", 4), node, 2) is None
    assert why_not_restart(Failure("exception", "x", rank=0, time=1.0), Failure("exception", "x", rank=1), None)
    assert why_not_restart(lost, lost, None) is None
