"""The heartbeat of each worker: a small record in the run's folder that says what it is doing and that it is alive.

No process collects the records; anyone may read them. A record outlives its worker, so it also says what a killed
worker was doing.
"""

import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.plan.layout import format_ranks

SIZE = 1024  # bytes of a record


@dataclass(frozen=True)
class Record:
    rank: int
    pid: int
    host: str
    step: int = -1
    task: str = "starting"
    waits_for: str = ""  # ranks, while in a collective
    since: float = 0.0  # when the task or the wait began
    beat: float = 0.0  # when the worker's watchdog last ran; an old one means a stopped process or a lost machine
    done: bool = False  # ended as it should, and beats no more


class Heartbeat:
    """This worker's record. Writing it is a copy to shared memory, cheap enough for every task."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with open(_path(folder, rank), "wb") as f:
            f.truncate(SIZE)
        with open(_path(folder, rank), "r+b") as f:
            self._map = mmap.mmap(f.fileno(), SIZE)
        self._lock = threading.Lock()  # the watchdog beats while the worker works
        now = time.time()
        self.record = Record(rank, os.getpid(), socket.gethostname())
        self._update(since=now, beat=now)

    def start_task(self, step: int, task: str) -> None:
        self._update(step=step, task=task, waits_for="", since=time.time())

    @contextmanager
    def waiting(self, ranks: tuple[int, ...]) -> Iterator[None]:
        """Records that this worker waits for the others of `ranks`."""
        others = tuple(r for r in ranks if r != self.record.rank)
        self._update(waits_for=format_ranks(others), since=time.time())
        yield
        self._update(waits_for="", since=time.time())

    def beat(self) -> None:
        self._update(beat=time.time())

    def finish(self) -> None:
        self._update(done=True)

    def flush(self) -> None:
        """Makes the record visible to other hosts that share the folder; without it they see it half a minute later."""
        with open(_path(self.folder, self.record.rank), "r+b") as f:
            os.fsync(f.fileno())

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self.record = replace(self.record, **changes)
            text = json.dumps(vars(self.record)).encode()
            if len(text) > SIZE:  # a long list of fields in the task's name
                text = json.dumps(vars(replace(self.record, task=self.record.task[:200]))).encode()
            self._map[:] = text[:SIZE].ljust(SIZE)


def read_records(folder: Path, workers: int) -> list[Record | None]:
    """Returns the records of all ranks; None for a worker that never started, or writes to a folder of another host."""
    return [read_record(folder, r) for r in range(workers)]


def read_record(folder: Path, rank: int) -> Record | None:
    """Returns the record of a rank, None if there is none that can be read."""
    for _ in range(5):  # it may be read while it is being written
        try:
            return Record(**json.loads(_path(folder, rank).read_bytes()))
        except OSError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            time.sleep(0.002)
    return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.heartbeat"
