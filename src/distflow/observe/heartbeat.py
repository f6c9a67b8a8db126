"""Who does what right now: each worker keeps one small record in the run's folder, and anybody may read them all.

There is no process that collects them. A record outlives its worker, so it also tells what a killed worker was doing.
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

SIZE = 1024


@dataclass(frozen=True)
class Record:
    rank: int
    pid: int
    host: str
    step: int = -1
    task: str = "starting"
    waits_for: str = ""  # ranks, while in a collective
    since: float = 0.0  # when it began to do or to wait for this
    beat: float = 0.0  # when its watchdog last ran: an old one means stopped, or the machine is gone
    done: bool = False  # it has ended as it should, and beats no more


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
        self._change(since=now, beat=now)

    def doing(self, step: int, task: str) -> None:
        self._change(step=step, task=task, waits_for="", since=time.time())

    @contextmanager
    def waiting(self, ranks: tuple[int, ...]) -> Iterator[None]:
        others = tuple(r for r in ranks if r != self.record.rank)
        self._change(waits_for=format_ranks(others), since=time.time())
        yield
        self._change(waits_for="", since=time.time())

    def beat(self) -> None:
        self._change(beat=time.time())

    def finish(self) -> None:
        self._change(done=True)

    def flush(self) -> None:
        """Other hosts that share the folder see a record only then, or half a minute later."""
        with open(_path(self.folder, self.record.rank), "r+b") as f:
            os.fsync(f.fileno())

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self.record = replace(self.record, **changes)
            text = json.dumps(vars(self.record)).encode()
            if len(text) > SIZE:  # a long list of fields in the task's name
                text = json.dumps(vars(replace(self.record, task=self.record.task[:200]))).encode()
            self._map[:] = text[:SIZE].ljust(SIZE)


def read_all(folder: Path, workers: int) -> list[Record | None]:
    """The records of all ranks; None where there is none (a worker that never started, or a folder of another host)."""
    return [read(folder, r) for r in range(workers)]


def read(folder: Path, rank: int) -> Record | None:
    """The record of one rank, if it is there and can be read."""
    for _ in range(5):  # a record may be caught half written
        try:
            return Record(**json.loads(_path(folder, rank).read_bytes()))
        except OSError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            time.sleep(0.002)
    return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.now"
