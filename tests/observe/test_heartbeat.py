"""The heartbeat and the table of who waits for whom, without processes."""

import re
import subprocess
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import patch

from distflow.errors import DistflowError, StoppedError
from distflow.observe.failures import Report, read_reports
from distflow.observe.heartbeat import Heartbeat, read_all
from distflow.observe.watchdog import Neighbour, Watchdog, describe


def test_a_record_tells_step_task_and_whom_a_worker_waits_for(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 1)
    heartbeat.doing(3, "judge")
    with heartbeat.waiting((0, 1, 2, 5)):
        record = read_all(tmp_path, 3)[1]
        assert record is not None
        assert (record.step, record.task, record.waits_for) == (3, "judge", "0,2,5")
    record = read_all(tmp_path, 3)[1]
    assert record is not None
    assert record.waits_for == ""
    assert read_all(tmp_path, 3)[0] is None


def test_a_long_task_name_does_not_break_the_record(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 0)
    heartbeat.doing(1, "move m0 (" + "field, " * 1000 + ")")
    record = read_all(tmp_path, 1)[0]
    assert record is not None
    assert record.task.startswith("move m0")


def test_the_table_names_the_one_that_waits_for_nobody(tmp_path: Path) -> None:
    waits, works = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    waits.doing(7, "move m2 (response)")
    works.doing(7, "judge")
    (tmp_path / "1.stack").write_text("  File judge.py, line 3\n")
    with waits.waiting((0, 1)):
        text = describe(read_all(tmp_path, 2), tmp_path, [])
    assert re.search(r"^0 .* 7 +move m2 \(response\) +0 s +1 ", text, re.M)
    assert "rank 1 waits for nobody: it is busy with 'judge' of step 7, here:\n  File judge.py, line 3" in text


def test_the_table_names_one_that_is_not_heard_of_and_one_that_never_came(tmp_path: Path) -> None:
    waits, gone = Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1)
    gone._change(step=2, task="update", beat=time.time() - 100)
    with waits.waiting((0, 1, 2)):
        text = describe(read_all(tmp_path, 3), tmp_path, [1])
    assert "rank 1 has not been heard of for 100 s" in text
    assert "it was in step 2, 'update'" in text
    assert "rank 2 has left no record" in text


def test_causes_come_before_echoes(tmp_path: Path) -> None:
    Report(0, "echo", "lost one of ranks 0-2").save(tmp_path)
    Report(2, "stuck", "who waits for whom").save(tmp_path)
    Report(1, "node", "node 'judge' raised", step=3).save(tmp_path)
    assert [r.rank for r in read_reports(tmp_path)] == [1, 2, 0]


def test_a_neighbour_that_stands_still_is_noticed_by_the_own_clock(tmp_path: Path) -> None:
    other, watched = Heartbeat(tmp_path, 1), Neighbour(tmp_path, 1, pause_s=10)
    assert [watched.still_s(t) for t in (100, 105, 110)] == [0, 0, 0]  # it may be a left-over of another run
    other.beat()
    assert [watched.still_s(t) for t in (115, 120, 125)] == [0, 5, 10]
    other._change(beat=5.0)  # by a clock that runs behind
    assert [watched.still_s(t) for t in (130, 135)] == [0, 5]
    assert watched.still_s(1000) == 0  # this worker was stopped itself
    assert watched.still_s(1005) == 5
    other.finish()
    assert watched.still_s(1010) == 0
    assert Neighbour(tmp_path, 2, pause_s=10).still_s(0) == 0  # on a host with a folder of its own


def test_who_was_alive_since_this_worker_started_is_missed_at_once(tmp_path: Path) -> None:
    watched = Neighbour(tmp_path, 1, pause_s=10)
    Heartbeat(tmp_path, 1)
    assert [watched.still_s(t) for t in (100, 105, 110)] == [0, 5, 10]


def test_a_worker_that_is_told_to_stop_ends_at_once_when_another_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended: SimpleQueue[DistflowError] = SimpleQueue()
    told = threading.Event()
    watch = Watchdog(Heartbeat(tmp_path, 0), 2, 1.0, ended.put, told.is_set, range(2))
    other = Heartbeat(tmp_path, 1)
    watch.start()
    told.set()
    time.sleep(0.5)
    assert ended.empty()  # it is there
    with patch("os.getpid", return_value=gone.pid):
        other = Heartbeat(tmp_path, 1)
    assert isinstance(ended.get(timeout=30), StoppedError)
    other.finish()
    watch.stop()
