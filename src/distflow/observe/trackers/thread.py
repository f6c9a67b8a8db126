"""Runs the trackers of a run beside it: one that fails or is slow neither stops nor slows training."""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distflow.observe.trackers.tracker import Tracker, sample_rows

logger = logging.getLogger(__name__)
MAX_BACKLOG = 200  # steps that a tracker may be behind; older ones wait, newer ones are dropped
CLOSE_LIMIT_S = 20.0  # a run waits this long for its trackers at the end

Opens = Callable[[], Tracker]
Act = Callable[[Tracker], None]


class TrackerThread:
    """One tracker in a thread of its own, which opens it, feeds it and closes it."""

    def __init__(self, name: str, opens: Opens) -> None:
        self.name = name
        self.dropped = 0
        self._queue: queue.Queue[Act | None] = queue.Queue(MAX_BACKLOG)
        self._failed = False
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
        if self._thread.is_alive() and not self._failed:
            logger.warning("track: %s has not finished in %.0f s; what is left is lost", self.name, CLOSE_LIMIT_S)
        if self.dropped:
            logger.warning("track: %s was too slow; %d entries were dropped", self.name, self.dropped)

    def _put(self, act: Act) -> None:
        if self._failed:
            return
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self.dropped += 1

    def _run(self, opens: Opens) -> None:
        try:
            tracker = opens()
            while (act := self._queue.get()) is not None:
                act(tracker)
            tracker.close()
        except Exception as e:  # of a package that is not ours: anything; the run goes on without it
            self._failed = True
            logger.warning("track: %s failed, the run goes on without it: %s: %s", self.name, type(e).__name__, e)
