"""The heartbeat and the table of who waits for whom, without processes."""

import re
import subprocess
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import patch

from distflow.errors import DistflowError, StoppedError
from distflow.observe.heartbeat import Heartbeat, read_records
from distflow.observe.watchdog import PeerMonitor, Watchdog, describe_waits


def test_a_record_has_step_task_and_the_ranks_a_worker_waits_for(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 1)
    heartbeat.start_task(3, "judge")
    with heartbeat.waiting((0, 1, 2, 5)):
        record = read_records(tmp_path, 3)[1]
        assert record is not None
        assert (record.step, record.task, record.waits_for) == (3, "judge", "0,2,5")
    record = read_records(tmp_path, 3)[1]
    assert record is not None
    assert record.waits_for == ""
    assert read_records(tmp_path, 3)[0] is None


def test_a_long_task_name_does_not_break_the_record(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.start_task(1, "move m0 (" + "field, " * 1000 + ")")
    record = read_records(tmp_path, 1)[0]
    assert record is not None
    assert record.task.startswith("move m0")


def test_the_table_names_the_rank_that_is_busy(tmp_path: Path) -> None:
    waits, works = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    waits.start_task(7, "move m2 (response)")
    works.start_task(7, "judge")
    (tmp_path / "1.stack").write_text("  File judge.py, line 3\n")
    with waits.waiting((0, 1)):
        text = describe_waits(read_records(tmp_path, 2), tmp_path, [])
    assert re.search(r"^0 .* 7 +move m2 \(response\) +0 s +1 ", text, re.M)
    assert "rank 1 waits for no other rank: it is busy with 'judge' of step 7, at:\n  File judge.py, line 3" in text


def test_the_table_names_a_rank_without_a_heartbeat_and_one_that_never_started(tmp_path: Path) -> None:
    waits, gone = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    gone._update(step=2, task="update", beat=time.time() - 100)
    with waits.waiting((0, 1, 2)):
        text = describe_waits(read_records(tmp_path, 3), tmp_path, [1])
    assert "rank 1 has had no heartbeat for 100 s" in text
    assert "it was in step 2, 'update'" in text
    assert "rank 2 has no record" in text


def test_a_peer_without_a_heartbeat_is_noticed_by_the_own_clock(tmp_path: Path) -> None:
    other, watched = Heartbeat(tmp_path, 1), PeerMonitor(tmp_path, 1, pause_s=10)
    assert [watched.silent_s(t) for t in (100, 105, 110)] == [0, 0, 0]  # it may be left over from another run
    other.beat()
    assert [watched.silent_s(t) for t in (115, 120, 125)] == [0, 5, 10]
    other._update(beat=5.0)  # by a clock that runs behind
    assert [watched.silent_s(t) for t in (130, 135)] == [0, 5]
    assert watched.silent_s(1000) == 0  # this worker was stopped itself
    assert watched.silent_s(1005) == 5
    other.finish()
    assert watched.silent_s(1010) == 0
    assert PeerMonitor(tmp_path, 2, pause_s=10).silent_s(0) == 0  # on a host with a folder of its own


def test_a_peer_that_was_alive_since_this_worker_started_is_missed_at_once(tmp_path: Path) -> None:
    watched = PeerMonitor(tmp_path, 1, pause_s=10)
    Heartbeat(tmp_path, 1)
    assert [watched.silent_s(t) for t in (100, 105, 110)] == [0, 5, 10]


def test_a_worker_that_is_asked_to_stop_ends_at_once_when_another_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended: SimpleQueue[DistflowError] = SimpleQueue()
    requested = threading.Event()
    watchdog = Watchdog(Heartbeat(tmp_path, 0), 2, 1.0, ended.put, requested.is_set, range(2))
    other = Heartbeat(tmp_path, 1)
    watchdog.start()
    requested.set()
    time.sleep(0.5)
    assert ended.empty()  # the other one is alive
    with patch("os.getpid", return_value=gone.pid):
        other = Heartbeat(tmp_path, 1)
    assert isinstance(ended.get(timeout=30), StoppedError)
    other.finish()
    watchdog.stop()
