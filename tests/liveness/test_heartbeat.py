"""The heartbeat and the watchdog, without processes."""

import subprocess
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from distflow.errors import DistflowError, PeerLostError, StoppedError, StuckError
from distflow.liveness.beacon import Beacon
from distflow.liveness.heartbeat import SIZE, Heartbeat, Peer, Record, pack, read_record, unpack
from distflow.liveness.watchdog import PeerMonitor, Watchdog
from limits import load_factor


def test_a_record_has_step_task_and_the_ranks_a_worker_waits_for() -> None:
    heartbeat = Heartbeat(1)
    heartbeat.start_task(3, "judge")
    with heartbeat.waiting((0, 1, 2, 5)):
        with heartbeat.waiting((0, 1)):
            assert heartbeat.record.waits_for == "0"
        assert (heartbeat.record.step, heartbeat.record.task, heartbeat.record.waits_for) == (3, "judge", "0,2,5")
    assert heartbeat.record.waits_for == ""


def test_a_launcher_reads_the_records_of_its_host(tmp_path: Path) -> None:
    heartbeat = Heartbeat(1, tmp_path / "workers")
    heartbeat.start_task(3, "judge")
    assert read_record(tmp_path / "workers", 1) == heartbeat.record
    assert read_record(tmp_path / "workers", 0) is None


def test_a_long_task_name_or_many_ranks_do_not_break_the_record(tmp_path: Path) -> None:
    heartbeat = Heartbeat(0, tmp_path)
    heartbeat.start_task(1, "move m0 (" + "field, " * 1000 + ")")
    with heartbeat.waiting(tuple(range(0, 5000, 2))):
        heartbeat.beat()
    record = read_record(tmp_path, 0)
    assert record is not None
    assert record.task.startswith("move m0")
    assert record.waits_for.startswith("2,4,6")
    assert (tmp_path / "0.heartbeat").stat().st_size == SIZE


def test_times_are_those_of_the_own_clock_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5_000.0)
    packet = pack(Record(0, 1, "a", since=4_990.0, beat=4_999.0))
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    record = unpack(packet)
    assert (record.since, record.beat) == (90, 99)


def test_a_peer_without_a_heartbeat_is_noticed_by_the_own_clock() -> None:
    monitor, record = PeerMonitor(pause_s=10), Record(1, 7, "b")
    assert [monitor.silent_s(t) for t in (100, 105, 110)] == [0, 0, 0]  # nothing was heard yet
    monitor.hear(record, 115)
    assert [monitor.silent_s(t) for t in (115, 120, 125)] == [0, 5, 10]
    monitor.hear(record, 130)
    assert [monitor.silent_s(t) for t in (130, 135)] == [0, 5]
    assert monitor.silent_s(1000) == 0  # this worker was stopped itself
    assert monitor.silent_s(1005) == 5
    monitor.hear(Record(1, 7, "b", done=True), 1006)
    assert monitor.silent_s(1010) == 0


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Workers:
    """Heartbeats and watchdogs of N workers in one process; `ended` has the ranks and errors of those that ended."""

    def __init__(self, n: int, limit_s: float = 0.5, **options: Any) -> None:
        self.heartbeats = [Heartbeat(r) for r in range(n)]
        beacons = [Beacon(r, n, "127.0.0.1") for r in range(n)]
        for beacon in beacons:
            beacon.connect("secret", lambda r: beacons[r].address)
        self.ended: SimpleQueue[tuple[int, DistflowError]] = SimpleQueue()
        self.watchdogs = [
            Watchdog(h, b, limit_s, lambda error, r=r: self._end(r, error), **options)  # type: ignore[misc]
            for r, (h, b) in enumerate(zip(self.heartbeats, beacons, strict=True))
        ]

    def start(self, *but: int) -> None:
        for h in self.heartbeats:
            h.start_task(2, "update")
        for r, w in enumerate(self.watchdogs):
            if r not in but:
                w.start()

    def freeze(self, rank: int) -> None:
        """Stops the heartbeat of a rank, as if its process was stopped."""
        self.watchdogs[rank]._stop.set()

    def _end(self, rank: int, error: DistflowError) -> None:
        self.ended.put((rank, error))
        raise SystemExit  # ends the thread

    def close(self) -> None:
        for w in self.watchdogs:
            w._stop.set()
        for w in self.watchdogs:
            if w._thread.is_alive():
                w._thread.join()


def test_a_wait_that_takes_too_long_is_reported_once_with_the_records_of_all() -> None:
    workers = Workers(9)
    for r, heartbeat in enumerate(workers.heartbeats):
        heartbeat.start_task(2, "move m1 (b)")
        if r != 5:
            heartbeat.waiting((*range(9),)).__enter__()
    workers.heartbeats[5].start_task(2, "judge")
    for w in workers.watchdogs:
        w.start()
    _, error = workers.ended.get(timeout=30 * load_factor())
    assert isinstance(error, StuckError)
    text = str(error)
    assert "a worker has waited more than 0.5 s for others (wait_limit_s)" in text
    assert "no answer" not in text
    assert text.count("move m1 (b)") == 8
    assert "rank 5 waits for no other rank: it is busy with 'judge' of step 2, at:\n" in text
    workers.close()
    while not workers.ended.empty():
        assert isinstance(workers.ended.get()[1], PeerLostError)


def test_a_worker_without_a_heartbeat_is_named_with_what_it_was_doing() -> None:
    workers = Workers(4)
    workers.start()
    time.sleep(0.3)
    workers.freeze(2)
    rank, error = workers.ended.get(timeout=30 * load_factor())
    assert rank != 2
    text = str(error)
    assert "a worker has had no heartbeat for more than 0.5 s (wait_limit_s)" in text
    assert "rank 2 has had no heartbeat for" in text
    assert "it was stopped or its machine is gone; it was in step 2, 'update' on " in text
    workers.close()


def test_a_peer_that_was_never_heard_of_is_no_reason_to_end(caplog: pytest.LogCaptureFixture) -> None:
    """As where a firewall drops UDP: then the run goes on, and says so."""
    workers = Workers(2, limit_s=0.1)
    workers.heartbeats[0].peers = [Peer("a", 1, True), Peer("b", 2, False)]
    workers.watchdogs[0]._started -= 100
    with caplog.at_level("WARNING", "distflow"):
        workers.start(1)
        time.sleep(0.5)
    assert workers.ended.empty()
    workers.close()
    assert "gets no heartbeat of rank 1 on b: allow UDP between the hosts" in caplog.text
    assert len(caplog.records) == 1


def test_workers_that_end_as_they_should_are_not_missed() -> None:
    workers = Workers(3, limit_s=0.3)
    workers.start()
    time.sleep(0.2)
    workers.watchdogs[1].stop()
    time.sleep(1)
    assert workers.ended.empty()
    workers.close()


def test_a_worker_that_is_asked_to_stop_ends_at_once_when_another_is_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    requested = threading.Event()
    workers = Workers(2, limit_s=100.0, stop_requested=requested.is_set)
    for w in workers.watchdogs:
        w.tick_s = 0.05
    alive = Peer("a", workers.heartbeats[0].pid, True)
    workers.heartbeats[0].peers = [alive, alive]
    requested.set()
    workers.start()
    time.sleep(0.3)
    assert workers.ended.empty()  # the other one is alive
    workers.heartbeats[0].peers = [alive, Peer("b", gone.pid, False)]
    time.sleep(0.3)
    assert workers.ended.empty()  # a process of another host is not looked for here
    workers.heartbeats[0].peers = [alive, Peer("a", gone.pid, True)]
    rank, error = workers.ended.get(timeout=30 * load_factor())
    assert rank == 0
    assert isinstance(error, StoppedError)
    workers.close()
