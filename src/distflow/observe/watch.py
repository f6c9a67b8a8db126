"""A watchdog in every worker: a wait that takes too long ends the run with a table of who waits for whom."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import distflow
from distflow.errors import StuckError
from distflow.observe.board import Board, Record, read_all
from distflow.plan.layout import parse_ranks

START_S = 300.0  # how long workers may wait for each other before the first step: they do not start at one moment
PACKAGE = str(Path(distflow.__file__).parent)


class Watch:
    """`on_stuck` is called, in the watchdog's thread, with the error that ends this worker; it must not return."""

    def __init__(self, board: Board, workers: int, limit_s: float, on_stuck: Callable[[StuckError], None]) -> None:
        self.board, self.workers, self.limit_s, self.on_stuck = board, workers, limit_s, on_stuck
        self.tick_s = min(1.0, limit_s / 10)
        self._alarm = board.folder / "alarm"
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.tick_s):
            self.board.beat()
            record = self.board.record
            if (raised := self._raised()) is not None:
                self._leave_stack()
                if time.time() - raised > 5 * self.tick_s + 2:  # nobody else has ended us
                    self.on_stuck(StuckError(f"rank {record.rank} ends: another worker has raised the alarm"))
            elif record.waits_for and time.time() - record.since > self._limit(record):
                self._raise_alarm()

    def _raised(self) -> float | None:
        """When somebody raised the alarm."""
        with contextlib.suppress(FileNotFoundError):
            return self._alarm.stat().st_mtime
        return None

    def _limit(self, record: Record) -> float:
        return self.limit_s if record.step >= 0 else max(self.limit_s, START_S)

    def _raise_alarm(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._alarm, os.O_CREAT | os.O_EXCL))
        self._leave_stack()
        self._stop.wait(3 * self.tick_s)  # the others see the alarm and leave their stacks
        records = read_all(self.board.folder, self.workers)
        _wake_stopped(records, 3 * self.tick_s)
        limit_s = self._limit(self.board.record)
        self.on_stuck(StuckError(describe(records, self.board.folder, limit_s, 3 * self.tick_s)))

    def _leave_stack(self) -> None:
        path = self.board.folder / f"{self.board.record.rank}.stack"
        if not path.exists():
            stack = traceback.extract_stack(sys._current_frames().get(self._main))
            theirs = [f for f in stack if not f.filename.startswith((PACKAGE, "<frozen"))]  # the user's own code
            path.write_text("".join(traceback.StackSummary.from_list(theirs or stack).format()[-6:]))


def describe(records: list[Record | None], folder: Path, limit_s: float, beat_s: float) -> str:
    """The table, and the stacks of those that others wait for and that wait for nobody."""
    now = time.time()
    rows = [("rank", "host:pid", "step", "task", "for", "waits for ranks", "heard of")]
    awaited: set[int] = set()
    for r, rec in enumerate(records):
        if rec is None:
            rows.append((str(r), "–", "–", "no record here", "", "", ""))
            continue
        if rec.waits_for:
            awaited |= set(parse_ranks(rec.waits_for, len(records), "board"))
        heard = f"{now - rec.beat:.0f} s ago"
        rows.append(
            (
                str(r),
                f"{rec.host}:{rec.pid}",
                str(rec.step),
                rec.task,
                f"{now - rec.since:.0f} s",
                rec.waits_for or "nobody",
                heard,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    text = f"a worker has waited for more than {limit_s:g} s (wait_limit_s); who waits for whom:\n" + "\n".join(lines)
    for r in sorted(awaited):
        found = records[r]
        if found is None:
            text += f"\nrank {r} has left no record: it never started, or runs on a host that does not share {folder}"
        elif now - found.beat > beat_s + 2:
            text += (
                f"\nrank {r} has not been heard of for {now - found.beat:.0f} s: it was stopped or its machine is gone;"
                f" it was in step {found.step}, '{found.task}'"
            )
        elif not found.waits_for:
            text += f"\nrank {r} waits for nobody: it is busy with '{found.task}' of step {found.step}"
            stack = folder / f"{r}.stack"
            if stack.exists():
                text += ", here:\n" + stack.read_text().rstrip()
    return text


def _wake_stopped(records: list[Record | None], beat_s: float) -> None:
    """A stopped process of this host cannot even be terminated: let it run into its termination signal."""
    for rec in records:
        if rec and rec.host == socket.gethostname() and time.time() - rec.beat > beat_s + 2:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rec.pid, signal.SIGCONT)
