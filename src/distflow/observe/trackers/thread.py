"""Runs the trackers of a run beside it: one that fails or is slow neither stops nor slows training."""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from distflow.observe.trackers.tracker import Tracker, sample_rows
from distflow.util.patient_files import WriteErrors

logger = logging.getLogger(__name__)
MAX_BACKLOG = 200  # steps that a tracker may be behind; older ones wait, newer ones are dropped
CLOSE_LIMIT_S = 20.0  # a run waits this long for its trackers at the end

Opens = Callable[[], Tracker]
Act = Callable[[Tracker], None]
T = TypeVar("T")


class TrackerThread:
    """One tracker in a thread of its own, which opens it, feeds it and closes it.

    What fails is lost to the tracker, and it is tried again: to open it after 1, 2, 4, … further entries.
    """

    def __init__(self, name: str, opens: Opens) -> None:
        self.name = name
        self.dropped = 0
        self._queue: queue.Queue[Act | None] = queue.Queue(MAX_BACKLOG)
        self._errors = WriteErrors(f"track: {name}")
        self._thread = threading.Thread(target=self._run, args=(opens,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda tracker: tracker.log(step, finite))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        rows = sample_rows(samples)
        self._put(lambda tracker: tracker.samples(step, rows))

    def close(self) -> None:
        """Flushes the queue, with a timeout."""
        with suppress(queue.Full):  # said below
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.warning("track: %s has not finished in %.0f s; what is left is lost", self.name, CLOSE_LIMIT_S)
        if self.dropped:
            logger.warning("track: %s was too slow; %d entries were dropped", self.name, self.dropped)

    def _put(self, act: Act) -> None:
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self.dropped += 1

    def _run(self, opens: Opens) -> None:
        tracker = self._try(opens)
        wait = left = 1  # entries before it is opened again
        while (act := self._queue.get()) is not None:
            left -= 1
            if tracker is None and left == 0:
                tracker = self._try(opens)
                wait = left = 2 * wait
            if tracker is None:
                self._errors.lost += 1
            elif self._try(partial(_done, act, tracker)):
                self._errors.succeeded()
            else:
                self._errors.lost += 1
        if tracker is not None:
            self._try(tracker.close)
        self._errors.close()

    def _try(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as e:  # of a package that is not ours: anything; the run goes on without it
            self._errors.failed(e)
            return None


def _done(act: Act, tracker: Tracker) -> bool:
    act(tracker)
    return True
