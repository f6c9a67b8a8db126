"""A watchdog thread in every worker: a wait that takes too long, or a peer without a heartbeat, ends the run."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import distflow
from distflow.errors import DistflowError, PeerLostError, StoppedError, StuckError
from distflow.liveness.beacon import Alarm, Answer, Beacon
from distflow.liveness.heartbeat import Heartbeat, Record, read_record
from distflow.liveness.waits import describe_waits

logger = logging.getLogger(__name__)
START_LIMIT_S = 300.0  # how long workers may wait for each other before the first step: they do not load alike
UNHEARD_S = 60.0  # after which a peer of which nothing was ever heard is reported
PACKAGE = str(Path(distflow.__file__).parent)


class Watchdog:
    """Calls `on_stuck`, in the watchdog's thread, with the error that ends this worker; it must not return.

    It checks how long this worker waits, and listens to the heartbeat of the next rank: a worker inside a model's own
    collective does not know that it waits, but a worker that was stopped has no heartbeat. Once `stop_requested`, this
    worker ends at once if another one on this host is gone: then it was not asked for a last step, but is being cleaned
    up by its launcher. `beacon`: None if there is only one worker.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        beacon: Beacon | None,
        limit_s: float,
        on_stuck: Callable[[DistflowError], None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.heartbeat, self.beacon, self.limit_s, self.on_stuck = heartbeat, beacon, limit_s, on_stuck
        self.rank, self.workers = heartbeat.rank, beacon.workers if beacon else 1
        self.tick_s = min(1.0, limit_s / 10)
        self._next = PeerMonitor(pause_s=5 * self.tick_s + 2)
        self._alarm: Alarm | None = None
        self._alarm_since, self._alarm_ticks = 0.0, 0
        self._raise_at = 0.0  # while another worker may still be first
        self._answers: dict[int, Answer] = {}
        self._stack = ""
        self._stop_requested, self._peer_was_gone, self._warned = stop_requested, False, False
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Marks this worker as done, so that no peer misses its heartbeat."""
        self._stop.set()
        if self.beacon:
            self.beacon.wake()
        self._thread.join()
        self.heartbeat.finish()
        if self.beacon:
            for _ in range(3):  # some may be lost
                self.beacon.send_beat(self.heartbeat.record)
            self.beacon.close()

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + self.tick_s
            if self.beacon is None:
                self._stop.wait(next_tick - time.monotonic())
                continue
            match self.beacon.receive(next_tick - time.monotonic()):
                case Record() as record if record.rank == (self.rank + 1) % self.workers:
                    self._next.hear(record, time.monotonic())
                case Alarm() as alarm:
                    self._heed(alarm)
                case Answer() as answer:
                    self._answers[answer.record.rank] = answer

    def _tick(self, now: float) -> None:
        self.heartbeat.beat()
        record = self.heartbeat.record
        if self.beacon:
            self.beacon.send_beat(record)
        limit_s = self.limit_s if record.step > 0 else max(self.limit_s, START_LIMIT_S)
        silent_s = self._next.silent_s(now)
        self._warn_unheard(now)
        if self._stop_requested() and self._local_peer_is_gone():
            if self._peer_was_gone:  # the main thread had a tick to notice by itself and to report it
                self.on_stuck(StoppedError("another worker has failed"))
            self._peer_was_gone = True
        if self._alarm:
            self._continue_alarm(now)
        elif record.waits_for and time.monotonic() - record.since > limit_s:
            self._raise_alarm(f"a worker has waited more than {limit_s:g} s for others (wait_limit_s)", now)
        elif silent_s > limit_s:
            self._raise_alarm(f"a worker has had no heartbeat for more than {limit_s:g} s (wait_limit_s)", now)
        else:
            self._raise_at = 0.0

    def _local_peer_is_gone(self) -> bool:
        """Returns whether a worker of this host has ended, although this one has not finished."""
        if self.heartbeat.record.task == "finish":
            return False
        return any(p.local and not _exists(p.pid) for r, p in enumerate(self.heartbeat.peers) if r != self.rank)

    def _warn_unheard(self, now: float) -> None:
        if self.workers > 1 and not self._next.record and not self._warned and now - self._started > UNHEARD_S:
            self._warned = True
            rank = (self.rank + 1) % self.workers
            where = f" on {self.heartbeat.peers[rank].host}" if self.heartbeat.peers else ""
            logger.warning(
                "rank %d on %s gets no heartbeat of rank %d%s: allow UDP between the hosts; without it, one that stops"
                " is noticed only by those that wait for it",
                self.rank,
                self.heartbeat.host,
                rank,
                where,
            )

    def _raise_alarm(self, reason: str, now: float) -> None:
        """Raises the alarm, unless another worker does within a tick: often all wait for the same one."""
        if not self._raise_at:
            self._raise_at = now + self.tick_s * (0.618 * self.rank % 1)
        if now < self._raise_at:
            return
        self._heed(Alarm(self.rank, self.beacon.address if self.beacon else "", reason))

    def _heed(self, alarm: Alarm) -> None:
        """Passes an alarm on and answers it. Of several alarms, that of the lowest rank is the one that counts."""
        if self._alarm and self._alarm.raiser <= alarm.raiser:
            return
        self._alarm_since = self._alarm_since or time.monotonic()
        self._alarm, self._alarm_ticks = alarm, 0
        self._stack = self._stack or self._find_stack()
        self._continue_alarm(time.monotonic())

    def _continue_alarm(self, now: float) -> None:
        """Repeats the alarm for some ticks, as packets may be lost, and ends this worker when it is over."""
        alarm, elapsed_s = self._alarm, now - self._alarm_since
        assert alarm is not None
        own = Answer(self.heartbeat.record, self._stack, self._silent_peer(now))
        self._alarm_ticks += 1
        if self.beacon and self._alarm_ticks <= 4:
            self.beacon.spread(alarm)
            self.beacon.answer(alarm, own)
        if alarm.raiser == self.rank:
            self._answers[self.rank] = own
            if len(self._answers) == self.workers or elapsed_s > 3 * self.tick_s + 3:
                self._report(alarm.reason)
        elif elapsed_s > 5 * self.tick_s + 8:  # the launcher has not ended this worker
            self.on_stuck(PeerLostError(f"rank {self.rank} ends: rank {alarm.raiser} has raised the alarm"))

    def _report(self, reason: str) -> None:
        silent = {a.silent.rank: a.silent for a in self._answers.values() if a.silent}
        silent = {r: record for r, record in silent.items() if r not in self._answers}
        table = describe_waits(self.workers, self._answers, silent, self.heartbeat.peers)
        # A stopped process of this host would not react to SIGTERM.
        for rank, record in silent.items():
            peers = self.heartbeat.peers
            if peers[rank].local if peers else record.host == self.heartbeat.host:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(record.pid, signal.SIGCONT)
        self.on_stuck(StuckError(f"{reason}; who waits for whom:\n{table}"))

    def _silent_peer(self, now: float) -> Record | None:
        heard = self._next.record
        if heard is None or self._next.silent_s(now) <= 3 * self.tick_s:
            return None
        # What it wrote for a launcher on this host is newer than what it sent with its last tick.
        written = read_record(self.heartbeat.folder, heard.rank) if self.heartbeat.folder else None
        return replace(written, beat=heard.beat) if written else heard

    def _find_stack(self) -> str:
        stack = traceback.extract_stack(sys._current_frames().get(self._main_thread))
        user_code = [f for f in stack if not f.filename.startswith((PACKAGE, "<frozen"))]
        return "".join(traceback.StackSummary.from_list(user_code or stack).format()[-6:])


class PeerMonitor:
    """Measures how long another rank has had no heartbeat, by this worker's clock: the clocks of two hosts differ."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.record: Record | None = None  # the last one
        self._since = self._checked = 0.0

    def hear(self, record: Record, now: float) -> None:
        self.record, self._since = record, now

    def silent_s(self, now: float) -> float:
        """Returns the seconds since the last heartbeat. After a pause of `pause_s` between two calls it was this worker
        that was stopped, and counting starts again."""
        paused, self._checked = now - self._checked > self.pause_s, now
        if paused:
            self._since = now
        return now - self._since if self.record and not self.record.done else 0.0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
