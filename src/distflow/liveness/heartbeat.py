"""Records the step and task of a worker: its watchdog sends the record to a peer, and writes it for a launcher here.

The file outlives its worker, so the launcher learns what a killed worker was doing. Times are of the monotonic clock,
which all processes of a host share; what is sent to another host are ages.
"""

import json
import logging
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distflow.plan.layout import format_ranks

logger = logging.getLogger(__name__)
# Set by a launcher: a folder on this host for the records of its workers, and for why they ended.
LAUNCHER_FOLDER = "DISTFLOW_LAUNCHER_FOLDER"
SIZE = 1024  # bytes of a file
MAX_TASK, MAX_WAITS = 160, 200  # characters


@dataclass(frozen=True)
class Record:
    rank: int
    pid: int
    host: str
    step: int = -1  # 0: evaluation before the first one; −1: before that
    task: str = "starting"
    waits_for: str = ""  # ranks, while in a collective
    since: float = 0.0  # when the task or the wait began
    beat: float = 0.0  # when the worker's watchdog last ran, or was last heard of
    done: bool = False  # ended as it should, and beats no more
    write_s: float = 0.0  # that its part of a checkpoint may take to be written


@dataclass(frozen=True)
class Peer:
    """The progress of another worker; `local`: its process can be seen from here; `address`: of its connections."""

    host: str
    pid: int
    local: bool
    address: str = ""


class Heartbeat:
    """This worker's record. Cheap enough for every task and every wait."""

    def __init__(self, rank: int, folder: Path | None = None) -> None:
        """`folder`: where a launcher reads the records of this host's workers."""
        self.rank, self.pid, self.host = rank, os.getpid(), socket.gethostname()
        self.folder = folder
        self.peers: Sequence[Peer] = ()  # by rank, once they are known
        self.data_age_s: Callable[[int], float | None] = lambda rank: None  # since the transport received data of it
        self.on_wait: Callable[[tuple[int, ...], float], None] | None = None  # told the ranks and seconds of each wait
        self.write_s = 0.0  # that this worker's part of a checkpoint may take
        self.first_step = math.inf  # that this worker takes; in it models are compiled and warm up
        self._map: mmap.mmap | None = None
        # Replaced as a whole: the watchdog reads it in its own thread.
        self._state: tuple[int, str, tuple[int, ...], float] = (-1, "starting", (), time.monotonic())
        self._beat, self._done = time.monotonic(), False
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._map = _map(_path(folder, rank))
        self._write()

    @property
    def step(self) -> int:
        return self._state[0]

    @property
    def record(self) -> Record:
        step, task, ranks, since = self._state
        waits_for = cut_ranks(format_ranks(tuple(r for r in ranks if r != self.rank)))
        doing = step, task[:MAX_TASK], waits_for, since
        return Record(self.rank, self.pid, self.host, *doing, self._beat, self._done, self.write_s)

    def start_task(self, step: int, task: str) -> None:
        if step > 0:
            self.first_step = min(self.first_step, step)
        self._state = (step, task, (), time.monotonic())
        self._write()

    @contextmanager
    def waiting(self, ranks: tuple[int, ...], allowed_s: float = 0.0) -> Iterator[None]:
        """Records that this worker waits for the others of `ranks`; `allowed_s` of it do not count."""
        step, task, before, _ = self._state
        self._state = (step, task, ranks, time.monotonic() + allowed_s)
        start = time.perf_counter()
        yield
        step, task, _, _ = self._state
        self._state = (step, task, before, time.monotonic())
        if self.on_wait:
            self.on_wait(ranks, time.perf_counter() - start)

    def beat(self) -> None:
        self._beat = time.monotonic()
        self._write()

    def finish(self) -> None:
        self._done = True
        self._write()

    def _write(self) -> None:
        if self._map is not None:
            self._map[:] = json.dumps(asdict(self.record)).encode()[:SIZE].ljust(SIZE)


def _map(path: Path) -> mmap.mmap | None:
    """Returns the memory of a record; None, and a warning, if there is no room for it."""
    try:
        with open(path, "w+b") as file:
            if hasattr(os, "posix_fallocate"):  # else, where a disk is full, the first write kills the process
                os.posix_fallocate(file.fileno(), 0, SIZE)
            file.truncate(SIZE)
            return mmap.mmap(file.fileno(), SIZE)
    except OSError as e:
        logger.warning("%s: cannot be written (%s); the launcher does not see what this worker does", path, e.strerror)
        return None


def pack(record: Record) -> dict[str, object]:
    """Returns a record for another host, whose clock is another one: times become ages."""
    return asdict(replace(record, since=time.monotonic() - record.since, beat=time.monotonic() - record.beat))


def unpack(fields: dict[str, object]) -> Record:
    """Returns the record of another host by this one's clock. Raises TypeError on anything else."""
    record = Record(**fields)  # type: ignore[arg-type]
    return replace(record, since=time.monotonic() - record.since, beat=time.monotonic() - record.beat)


def read_record(folder: Path, rank: int) -> Record | None:
    """Returns the record of a worker of this host, None if there is none that can be read."""
    for _ in range(5):  # it may be read while it is being written
        try:
            return Record(**json.loads(_path(folder, rank).read_bytes()))
        except OSError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            time.sleep(0.002)
    return None


def pids(folder: Path) -> list[int]:
    """Returns the processes of a launcher's workers, as far as they have started."""
    records = (read_record(folder, int(path.stem)) for path in folder.glob("*.heartbeat"))
    return [record.pid for record in records if record]


def step_name(step: int) -> str:
    """Names a record's step in a message."""
    return f"step {step}" if step >= 0 else "the start of the run"


def cut_ranks(text: str) -> str:
    return text if len(text) <= MAX_WAITS else text[:MAX_WAITS].rpartition(",")[0]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.heartbeat"
