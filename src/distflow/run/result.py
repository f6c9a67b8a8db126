"""The result of a run, read from its folder for the Python API, and the calls per step while it runs."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from distflow.errors import DistflowError
from distflow.run_folder import CHECKPOINTS, METRICS, checkpoint_dir
from distflow.util.lines import Tail, step_row

POLL_S = 0.2


class RunError(DistflowError):
    """A run has failed; the message is the cause that its workers reported."""


@dataclass(frozen=True)
class RunResult:
    """The folder of a run, its metrics, a dict for each step, and its last checkpoint, if it has written one."""

    folder: Path
    metrics: list[dict[str, float]] = field(repr=False)
    checkpoint: Path | None

    @classmethod
    def read(cls, folder: Path) -> "RunResult":
        from distflow.checkpoint.store import list_checkpoints

        steps = list_checkpoints(folder / CHECKPOINTS)
        newest = checkpoint_dir(folder / CHECKPOINTS, steps[0]) if steps else None
        return cls(folder, list(_new_rows(Tail(folder / METRICS))), newest)

    @property
    def last(self) -> dict[str, float]:
        """Returns the metrics of the last step."""
        return self.metrics[-1] if self.metrics else {}


class StepCalls:
    """Calls a function for each step that a run logs, in a thread of its own."""

    def __init__(self, folder: Path, function: Callable[[int, dict[str, float]], object]) -> None:
        self._tail, self._function = Tail(folder / METRICS), function
        # A resumed run keeps the rows of earlier ones.
        self._earlier, self._last = {_key(row) for row in _new_rows(Tail(folder / METRICS))}, -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._in_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def raise_error(self) -> None:
        """Raises the error of a call."""
        if self._error:
            raise self._error

    def _run(self) -> None:
        while not self._error:
            over = self._over.wait(POLL_S)
            try:
                self._call_new()
            except BaseException as e:
                self._error = e
                if self._in_main and not over:
                    os.kill(os.getpid(), signal.SIGTERM)  # the workers finish their step and save it
            if over:
                return

    def _call_new(self) -> None:
        for row in _new_rows(self._tail):
            step = int(row["step"])
            if _key(row) not in self._earlier and step > self._last:  # after a restart, steps come again
                self._last = step
                self._function(step, row)


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("step"), row.get("time")


def _new_rows(tail: Tail) -> Iterator[dict[str, Any]]:
    """Yields the rows of complete lines that were written since the last time."""
    for _, line in tail.lines():
        if row := step_row(line):
            yield row
