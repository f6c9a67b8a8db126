"""Records the work of a worker over time, in its own file in the run's folder: `spans/RANK.jsonl`.

A line is `[end_us, duration_us, step, kind, name, details]`: microseconds since 1970 by a clock that all workers agreed
on at the start of the run. Lines are in the order of their ends. The kinds are those of tasks (load, move, weights,
resample), of nodes (inference, train, compute), `call` for a part of a node, `control` (metrics and the vote to stop),
`checkpoint`, and `step`, which ends when the step has ended.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distflow.observe.bounded_log import BoundedLog
from distflow.plan.layout import format_ranks
from distflow.run_folder import SPANS, rank_file

LIMIT = 4 << 20  # bytes of a worker's file
FLUSH_S = 5.0  # lines are at most this old when a task ends; else they are written once a step
MAX_PEERS, PEERS_EVERY = 64, 16  # a task that sends to more peers lists them only in every 16th step
MAX_CALLS = 64  # of one task
MAX_MESSAGE = 4000  # characters
MAX_AWAITED = 60  # characters of the ranks that a task has waited for


class SpanRecorder:
    """Records the spans of one worker. `sent`: bytes to each peer; it is emptied by every span."""

    def __init__(self, folder: Path, rank: int, sent: Counter[int]) -> None:
        self.log = BoundedLog(rank_file(folder, SPANS, rank), LIMIT, step_of)
        self.sent = sent
        self._lines: list[bytes] = []
        self._offset = 0.0  # of the common clock from this process's
        self._flushed = self._step_start = time.perf_counter()
        self._waited = 0.0  # seconds in this span
        self._awaited: tuple[float, tuple[int, ...]] = (0.0, ())  # the longest wait in it, and for whom
        self._calls = 0

    def open(self, now: float, first: int) -> None:
        """Starts to record: it is `now` on all workers, in seconds since 1970, and step `first` is done."""
        self._offset = now - time.perf_counter()
        self._flushed = self._step_start = time.perf_counter()
        self.sent.clear()
        self.log.open(first)

    def waited(self, ranks: tuple[int, ...], seconds: float) -> None:
        """Adds a wait for other workers to the task that is running."""
        self._waited += seconds
        if seconds > self._awaited[0]:
            self._awaited = seconds, ranks

    @contextmanager
    def task(self, step: int, kind: str, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Records the block as one span; further details may be added to the dict it gives."""
        self._waited, self._awaited, self._calls = 0.0, (0.0, ()), 0
        start = time.perf_counter()
        yield details
        end = time.perf_counter()
        if self._waited:
            details["wait_us"] = round(self._waited * 1e6)
            details["waits_for"] = format_ranks(self._awaited[1])[:MAX_AWAITED]
        self._add(step, kind, name, start, end, details | _sent(step, self.sent))
        if end - self._flushed > FLUSH_S:
            self.flush()

    @contextmanager
    def call(self, step: int, name: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Records a part of a task, such as the calls of an environment; only the first ones of a task."""
        start = time.perf_counter()
        yield details
        self._calls += 1
        if self._calls <= MAX_CALLS:
            self._add(step, "call", name, start, time.perf_counter(), details)

    def sent_by_thread(self, step: int, kind: str, name: str, sent: Counter[int], **details: Any) -> None:
        """Records what a thread besides the chain has sent for a task, as a span without a duration; empties `sent`."""
        if sent:
            now = time.perf_counter()
            self._add(step, kind, name, now, now, details | _sent(step, sent))

    def end_step(self, step: int, **details: Any) -> None:
        """Records the step as a whole, and writes all that is not yet written."""
        end = time.perf_counter()
        self._add(step, "step", "", self._step_start, end, details)
        self._step_start = end
        self.flush()

    def fail(self, step: int, message: str) -> None:
        """Records why this worker ends."""
        now = time.perf_counter()
        self._add(step, "error", message[:MAX_MESSAGE], self._step_start, now, {})
        self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []  # a thread may add to them at any time
        self.log.append(lines)
        self._flushed = time.perf_counter()

    def _add(self, step: int, kind: str, name: str, start: float, end: float, details: dict[str, Any]) -> None:
        if self.log.keeps(step):
            times = round((end + self._offset) * 1e6), round((end - start) * 1e6)
            self._lines.append(span_line(*times, step, kind, name, details))


def _sent(step: int, sent: Counter[int]) -> dict[str, Any]:
    """Returns the bytes to all peers, and to each where there are few; empties `sent`."""
    if not sent:
        return {}
    details: dict[str, Any] = {"sent": sum(sent.values())}
    if len(sent) <= MAX_PEERS or step % PEERS_EVERY == 0:
        details["to"] = dict(sent)
    sent.clear()
    return details


def span_line(end_us: int, duration_us: int, step: int, kind: str, name: str, details: dict[str, Any]) -> bytes:
    """Returns a line of the file."""
    line = [end_us, duration_us, step, kind, name, *([details] if details else [])]
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def step_of(line: bytes) -> int | None:
    """Returns the step of a line, None if the line is not whole."""
    parts = line.split(b",", 3)
    return int(parts[2]) if line.endswith(b"]\n") and len(parts) == 4 and parts[2].lstrip(b"-").isdigit() else None
