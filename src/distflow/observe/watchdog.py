"""A watchdog in every worker: too long a wait, or a worker that is not heard of, ends the run with a table."""

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
from distflow.observe.heartbeat import Heartbeat, Record, read, read_all
from distflow.plan.layout import parse_ranks

START_S = 300.0  # how long workers may wait for each other before the first step: they do not start at one moment
PACKAGE = str(Path(distflow.__file__).parent)


class Watchdog:
    """`on_stuck` is called, in the watchdog's thread, with the error that ends this worker; it must not return.

    It looks at how long this worker waits, and at the record of the next rank: one that hangs inside a model's own
    collective does not know that it waits, but a worker that was stopped does not beat. A worker that is told to
    stop ends at once if one `beside` it, on this host, is gone: it was not asked for a last step, but is cleared away.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        workers: int,
        limit_s: float,
        on_stuck: Callable[[DistflowError], None],
        told_to_stop: Callable[[], bool] = lambda: False,
        beside: range = range(0),
    ) -> None:
        self.heartbeat, self.workers, self.limit_s, self.on_stuck = heartbeat, workers, limit_s, on_stuck
        self.tick_s = min(1.0, limit_s / 10)
        rank = heartbeat.record.rank
        self._next = Neighbour(heartbeat.folder, (rank + 1) % workers, 5 * self.tick_s + 2)
        self._seen_by = (rank - 1) % workers
        self._flushed = 0.0
        self._alarm, self._alarm_seen = heartbeat.folder / "alarm", 0.0
        self._told, self._beside, self._gone_seen = told_to_stop, beside, False
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The worker ends as it should: nobody is to miss it."""
        self._stop.set()
        self._thread.join()
        self.heartbeat.finish()

    def _run(self) -> None:
        while not self._stop.wait(self.tick_s):
            self.heartbeat.beat()
            self._flush()
            record, now = self.heartbeat.record, time.monotonic()
            limit_s = self.limit_s if record.step >= 0 else max(self.limit_s, START_S)
            still_s = self._next.still_s(now) if self.workers > 1 else 0.0
            if self._told() and self._somebody_is_gone():
                if self._gone_seen:  # time enough to notice by itself, and to say what it noticed
                    self.on_stuck(StoppedError("another worker has failed"))
                self._gone_seen = True
            if os.path.exists(self._alarm):  # unlike a Path, false where a shared folder fails
                self._leave_stack()
                self._alarm_seen = self._alarm_seen or now
                if now - self._alarm_seen > 5 * self.tick_s + 5:  # nobody else has ended us
                    self.on_stuck(PeerLostError(f"rank {record.rank} ends: another worker has raised the alarm"))
            elif record.waits_for and time.time() - record.since > limit_s:
                self._raise_alarm(f"a worker has waited for more than {limit_s:g} s (wait_limit_s)")
            elif still_s > limit_s:
                self._raise_alarm(f"a worker has not been heard of for more than {limit_s:g} s (wait_limit_s)")

    def _somebody_is_gone(self) -> bool:
        """Without having ended as it should."""
        me = self.heartbeat.record
        found = (read(self.heartbeat.folder, r) for r in self._beside if r != me.rank)
        return any(not r.done and r.host == me.host and not _exists(r.pid) for r in found if r)

    def _flush(self) -> None:
        """Where another host watches this worker."""
        if self.workers > 1 and time.monotonic() - self._flushed > self.limit_s / 4:
            self._flushed = time.monotonic()
            watcher = read(self.heartbeat.folder, self._seen_by)
            if watcher and watcher.host != self.heartbeat.record.host:
                with contextlib.suppress(OSError):
                    self.heartbeat.flush()

    def _raise_alarm(self, why: str) -> None:
        try:
            os.close(os.open(self._alarm, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # the one that was first tells
        except OSError:
            pass  # a full disk: the others see no alarm, but soon that this worker is gone
        self._leave_stack()
        before = read_all(self.heartbeat.folder, self.workers)
        self._stop.wait(3 * self.tick_s)  # the others see the alarm and leave their stacks
        self.heartbeat.beat()
        end = time.monotonic() + 2
        while (silent := _silent(before, self.heartbeat.folder)) and time.monotonic() < end:
            self._stop.wait(self.tick_s / 2)
        table = describe(read_all(self.heartbeat.folder, self.workers), self.heartbeat.folder, silent)
        _wake_stopped([before[r] for r in silent])
        self.on_stuck(StuckError(f"{why}; who waits for whom:\n{table}"))

    def _leave_stack(self) -> None:
        path = self.heartbeat.folder / f"{self.heartbeat.record.rank}.stack"
        with contextlib.suppress(OSError):
            if path.exists():
                return
            stack = traceback.extract_stack(sys._current_frames().get(self._main))
            theirs = [f for f in stack if not f.filename.startswith((PACKAGE, "<frozen"))]  # the user's own code
            path.write_text("".join(traceback.StackSummary.from_list(theirs or stack).format()[-6:]))


class Neighbour:
    """How long the record of another rank has stood still, by this worker's own clock: those of two hosts differ."""

    def __init__(self, folder: Path, rank: int, pause_s: float) -> None:
        self.folder, self.rank, self.pause_s = folder, rank, pause_s
        self._beat: float | None = None
        # Else the record may be a left-over, in a folder that is not shared.
        self._alive = False
        self._host, self._started = socket.gethostname(), time.time()
        self._since = self._looked = 0.0

    def still_s(self, now: float) -> float:
        """To be asked again and again: after a longer pause it was this worker that was stopped."""
        record = read(self.folder, self.rank)
        paused, self._looked = now - self._looked > self.pause_s, now
        if record is None or record.done:
            return 0.0
        if record.beat != self._beat:
            since_then = record.host == self._host and record.beat > self._started  # by the same clock
            self._alive = self._beat is not None or since_then
        if record.beat != self._beat or paused:
            self._beat, self._since = record.beat, now
        return now - self._since if self._alive else 0.0


def describe(records: Sequence[Record | None], folder: Path, silent: Collection[int]) -> str:
    """The table, those that do not beat, and the stacks of those that others wait for and that wait for nobody."""
    now = time.time()
    rows = [("rank", "host:pid", "step", "task", "for", "waits for ranks", "heard of")]
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
                rec.waits_for or "nobody",
                "has ended" if rec.done else f"{now - rec.beat:.0f} s ago",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for r in sorted(awaited):
        found = records[r]
        if found is None:
            lines.append(
                f"rank {r} has left no record: it never started, or runs on a host that does not share {folder}"
            )
        elif r in silent:
            lines.append(
                f"rank {r} has not been heard of for {now - found.beat:.0f} s: it was stopped or its machine is gone;"
                f" it was in step {found.step}, '{found.task}'"
            )
        elif not found.waits_for and not found.done:
            stack = folder / f"{r}.stack"
            here = f", here:\n{stack.read_text().rstrip()}" if stack.exists() else ""
            lines.append(f"rank {r} waits for nobody: it is busy with '{found.task}' of step {found.step}{here}")
    return "\n".join(lines)


def _silent(before: Sequence[Record | None], folder: Path) -> list[int]:
    """The ranks that have not beaten since."""
    return [
        r
        for r, old in enumerate(before)
        if old and not old.done and (new := read(folder, r)) and not new.done and new.beat == old.beat
    ]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _wake_stopped(records: Iterable[Record | None]) -> None:
    """A stopped process of this host cannot even be terminated: let it run into its termination signal."""
    for rec in records:
        if rec and rec.host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rec.pid, signal.SIGCONT)
