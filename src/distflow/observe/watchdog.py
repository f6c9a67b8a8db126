"""A watchdog thread in every worker: a wait that takes too long, or a peer without a heartbeat, ends the run."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import distflow
from distflow.errors import DistflowError, PeerLostError, StoppedError, StuckError
from distflow.observe.heartbeat import Heartbeat, Record, read_record, read_records
from distflow.plan.layout import parse_ranks

START_LIMIT_S = 300.0  # how long workers may wait for each other before the first step: they do not start together
PACKAGE = str(Path(distflow.__file__).parent)


class Watchdog:
    """Calls `on_stuck`, in the watchdog's thread, with the error that ends this worker; it must not return.

    It checks how long this worker waits, and the heartbeat of the next rank: a worker inside a model's own collective
    does not know that it waits, but a worker that was stopped has no heartbeat. Once `stop_requested`, this worker
    ends at once if another one of `local_ranks`, on this host, is gone: then it was not asked for a last step, but is
    being cleaned up by torchelastic.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        workers: int,
        limit_s: float,
        on_stuck: Callable[[DistflowError], None],
        stop_requested: Callable[[], bool] = lambda: False,
        local_ranks: range = range(0),
    ) -> None:
        self.heartbeat, self.workers, self.limit_s, self.on_stuck = heartbeat, workers, limit_s, on_stuck
        self.tick_s = min(1.0, limit_s / 10)
        rank = heartbeat.record.rank
        self._next = PeerMonitor(heartbeat.folder, (rank + 1) % workers, 5 * self.tick_s + 2)
        self._watched_by = (rank - 1) % workers
        self._flushed = 0.0
        self._alarm, self._alarm_since = heartbeat.folder / "alarm", 0.0
        self._stop_requested, self._local_ranks, self._peer_was_gone = stop_requested, local_ranks, False
        self._stop = threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Marks this worker as done, so that no peer misses its heartbeat."""
        self._stop.set()
        self._thread.join()
        self.heartbeat.finish()

    def _run(self) -> None:
        while not self._stop.wait(self.tick_s):
            self.heartbeat.beat()
            self._flush()
            record, now = self.heartbeat.record, time.monotonic()
            limit_s = self.limit_s if record.step >= 0 else max(self.limit_s, START_LIMIT_S)
            silent_s = self._next.silent_s(now) if self.workers > 1 else 0.0
            if self._stop_requested() and self._local_peer_is_gone():
                if self._peer_was_gone:  # the main thread had a tick to notice by itself and to report it
                    self.on_stuck(StoppedError("another worker has failed"))
                self._peer_was_gone = True
            if os.path.exists(self._alarm):  # unlike Path.exists, False where a shared folder fails
                self._write_stack()
                self._alarm_since = self._alarm_since or now
                if now - self._alarm_since > 5 * self.tick_s + 5:  # the launcher has not ended this worker
                    self.on_stuck(PeerLostError(f"rank {record.rank} ends: another worker has raised the alarm"))
            elif record.waits_for and time.time() - record.since > limit_s:
                self._raise_alarm(f"a worker has waited more than {limit_s:g} s for others (wait_limit_s)")
            elif silent_s > limit_s:
                self._raise_alarm(f"a worker has had no heartbeat for more than {limit_s:g} s (wait_limit_s)")

    def _local_peer_is_gone(self) -> bool:
        """Whether a worker of this host has ended without finishing."""
        me = self.heartbeat.record
        peers = (read_record(self.heartbeat.folder, r) for r in self._local_ranks if r != me.rank)
        return any(not p.done and p.host == me.host and not _exists(p.pid) for p in peers if p)

    def _flush(self) -> None:
        """Flushes the heartbeat now and then, if it is watched from another host."""
        if self.workers > 1 and time.monotonic() - self._flushed > self.limit_s / 4:
            self._flushed = time.monotonic()
            watcher = read_record(self.heartbeat.folder, self._watched_by)
            if watcher and watcher.host != self.heartbeat.record.host:
                with contextlib.suppress(OSError):
                    self.heartbeat.flush()

    def _raise_alarm(self, reason: str) -> None:
        try:
            os.close(os.open(self._alarm, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # another worker was first, and reports it
        except OSError:
            pass  # a full disk: the others see no alarm, but soon that this worker is gone
        self._write_stack()
        before = read_records(self.heartbeat.folder, self.workers)
        self._stop.wait(3 * self.tick_s)  # the others see the alarm and write their stacks
        self.heartbeat.beat()
        end = time.monotonic() + 2
        while (silent := _silent_ranks(before, self.heartbeat.folder)) and time.monotonic() < end:
            self._stop.wait(self.tick_s / 2)
        table = describe_waits(read_records(self.heartbeat.folder, self.workers), self.heartbeat.folder, silent)
        _continue_stopped([before[r] for r in silent])
        self.on_stuck(StuckError(f"{reason}; who waits for whom:\n{table}"))

    def _write_stack(self) -> None:
        path = self.heartbeat.folder / f"{self.heartbeat.record.rank}.stack"
        with contextlib.suppress(OSError):
            if path.exists():
                return
            stack = traceback.extract_stack(sys._current_frames().get(self._main_thread))
            user_code = [f for f in stack if not f.filename.startswith((PACKAGE, "<frozen"))]
            path.write_text("".join(traceback.StackSummary.from_list(user_code or stack).format()[-6:]))


class PeerMonitor:
    """Measures how long another rank has had no heartbeat, by this worker's clock: the clocks of two hosts differ."""

    def __init__(self, folder: Path, rank: int, pause_s: float) -> None:
        self.folder, self.rank, self.pause_s = folder, rank, pause_s
        self._beat: float | None = None
        # A record without any heartbeat may be left over from another run, in a folder that is not shared.
        self._alive = False
        self._host, self._started = socket.gethostname(), time.time()
        self._since = self._checked = 0.0

    def silent_s(self, now: float) -> float:
        """Returns the seconds since the last heartbeat. After a pause of `pause_s` between two calls it was this worker
        that was stopped, and counting starts again."""
        record = read_record(self.folder, self.rank)
        paused, self._checked = now - self._checked > self.pause_s, now
        if record is None or record.done:
            return 0.0
        if record.beat != self._beat:
            since_start = record.host == self._host and record.beat > self._started  # by the same clock
            self._alive = self._beat is not None or since_start
        if record.beat != self._beat or paused:
            self._beat, self._since = record.beat, now
        return now - self._since if self._alive else 0.0


def describe_waits(records: Sequence[Record | None], folder: Path, silent: Collection[int]) -> str:
    """Returns the table of who waits for whom, the ranks without a heartbeat, and the stacks of busy ranks."""
    now = time.time()
    rows = [("rank", "host:pid", "step", "task", "for", "waits for ranks", "heartbeat")]
    awaited = set(silent)
    for r, rec in enumerate(records):
        if rec is None:
            rows.append((str(r), "–", "–", "no record here", "", "", ""))
            continue
        if rec.waits_for:
            awaited |= set(parse_ranks(rec.waits_for, len(records), "heartbeat"))
        rows.append(
            (
                str(r),
                f"{rec.host}:{rec.pid}",
                str(rec.step),
                rec.task,
                f"{now - rec.since:.0f} s",
                rec.waits_for or "none",
                "has ended" if rec.done else f"{now - rec.beat:.0f} s ago",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for r in sorted(awaited):
        record = records[r]
        if record is None:
            lines.append(f"rank {r} has no record: it never started, or runs on a host that does not share {folder}")
        elif r in silent:
            lines.append(
                f"rank {r} has had no heartbeat for {now - record.beat:.0f} s: it was stopped or its machine is gone;"
                f" it was in step {record.step}, '{record.task}'"
            )
        elif not record.waits_for and not record.done:
            stack = folder / f"{r}.stack"
            at = f", at:\n{stack.read_text().rstrip()}" if stack.exists() else ""
            lines.append(f"rank {r} waits for no other rank: it is busy with '{record.task}' of step {record.step}{at}")
    return "\n".join(lines)


def _silent_ranks(before: Sequence[Record | None], folder: Path) -> list[int]:
    """Returns the ranks without a heartbeat since `before`."""
    return [
        r
        for r, old in enumerate(before)
        if old and not old.done and (new := read_record(folder, r)) and not new.done and new.beat == old.beat
    ]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _continue_stopped(records: Iterable[Record | None]) -> None:
    """Continues stopped processes of this host: a stopped process does not react to SIGTERM."""
    for rec in records:
        if rec and rec.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rec.pid, signal.SIGCONT)
