"""One owner per folder of a run, with any launcher, also where hosts share the folder and locks do not reach across.

The owner writes a record, `.owner.N`, and renews it every few seconds. Another run may take the folder over if the
owner has released it, is known to be gone (on the same host), or has not renewed its record for a while, by the clock
of who looks: the clocks of two hosts are never compared. It does so by creating the record N + 1, which only one can,
and removing the old one, from which the old owner learns that it has to end. Imports no torch.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from distflow.errors import ConfigError, DistflowError
from distflow.util.parent import process_exists, process_status
from distflow.util.private_folder import open_lock

logger = logging.getLogger(__name__)
LOCK, RECORD = ".lock", ".owner."
OWNER = "DISTFLOW_OWNER"  # environment variable: what `Owner.token` is, for workers whose launcher owns the folder
RENEW_S, STALE_S = 5.0, 60.0  # network file systems may show the state of some seconds ago
_SIZE = 512  # bytes of a record, which is written in place
_WAY_OUT = "wait for it, stop it, or choose another run_dir"


@dataclass(frozen=True)
class Record:
    nonce: str
    host: str
    kernel: str  # equal for processes of one host until it reboots
    pid: int
    pid_space: int  # equal for processes that see each other
    started: int  # of the process, in ticks since boot
    since: str  # for messages only
    renewed: int = 0  # how often
    released: bool = False

    @classmethod
    def own(cls) -> "Record":
        pid, now = os.getpid(), datetime.now(UTC).isoformat(timespec="seconds")
        return cls(
            secrets.token_hex(8), socket.gethostname()[:64], _kernel(), pid, _pid_space(), process_status(pid)[2], now
        )

    def __str__(self) -> str:
        return f"{self.host} (pid {self.pid}, since {self.since})"

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_SIZE)

    def is_alive(self, lock: Path | None) -> bool | None:
        """Returns whether its process lives, None if that cannot be known from here. `lock`: held while it does."""
        if self.released or self.kernel != _kernel():
            return False if self.released else None
        if self.pid_space == _pid_space():
            return process_exists(self.pid, self.started)
        return None if lock is None else _is_locked(lock)


class Owner:
    """Owns a folder from its creation until `release`. `on_lost` is called, in another thread, when it no longer does.

    It waits for `stale_s` where an owner on another host might still live.
    """

    def __init__(
        self,
        folder: Path,
        on_lost: Callable[[str], None] = lambda _: None,
        renew_s: float = RENEW_S,
        stale_s: float = STALE_S,
    ) -> None:
        self.folder, self._on_lost, self._renew_s, self._stale_s = folder, on_lost, renew_s, stale_s
        self._record = Record.own()
        self._lock = _lock(folder)
        try:
            self._path = self._take()
        except BaseException:
            self._lock.close()
            raise
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.release()

    @property
    def token(self) -> str:
        """Returns what `check_owner` needs in another process."""
        return f"{self._record.nonce} {self._path}"

    def release(self) -> None:
        """Lets another run have the folder."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(self._renew_s)  # a file system may hang
        self._record = replace(self._record, released=True)
        with contextlib.suppress(OSError, DistflowError):
            self._write()
        self._lock.close()

    def _take(self) -> Path:
        while True:
            number, record = _newest(self.folder)
            if number and (record is None or not record.released):
                self._wait_for_end(number, record)
            path = _record_path(self.folder, number + 1)
            try:
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(self._record.pack())
            except FileExistsError:  # another run was first
                time.sleep(0.05)
                continue
            except OSError as e:
                raise ConfigError(f"run_dir: {path} cannot be written: {e.strerror}; free space, or see why") from None
            for old in _numbers(self.folder):
                if old <= number:
                    _record_path(self.folder, old).unlink(missing_ok=True)
            return path

    def _wait_for_end(self, number: int, record: Record | None) -> None:
        """Returns once a record is no longer one of a live owner; raises if it is."""
        path = _record_path(self.folder, number)
        if record is not None:
            # With the lock in hand, an owner under the same kernel is gone, even if its processes cannot be seen.
            gone = record.kernel == _kernel() and _locks_work(self._lock)
            alive = False if gone else record.is_alive(None)
            if alive is False:
                return
            if alive:
                raise ConfigError(_refusal(self.folder, record))
        seen = _read(path)
        logger.warning(
            "%s was owned by another run, on %s; it is taken over unless that shows a sign of life within %g s",
            self.folder,
            record or "an unknown host",
            self._stale_s,
        )
        end = time.monotonic() + self._stale_s
        while time.monotonic() < end:
            time.sleep(min(0.5, self._stale_s / 10))
            data = _read(path)
            record = _parse(data)
            if data == b"" or (record and record.released):
                return
            if data != seen:
                raise ConfigError(_refusal(self.folder, record))

    def _run(self) -> None:
        while not self._stop.wait(self._renew_s):
            self._record = replace(self._record, renewed=self._record.renewed + 1)
            try:
                self._write()
            except DistflowError as e:
                self._stop.set()
                self._lock.close()
                self._on_lost(str(e))
            except OSError:  # a full disk or a network that is down: the record is renewed once it can be
                continue

    def _write(self) -> None:
        check_owner(self.token)
        with contextlib.suppress(FileNotFoundError):  # which the next check sees
            fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "wb") as file:
                file.write(self._record.pack())


def check_owner(token: str) -> None:
    """Raises unless the run with this token still owns its folder."""
    nonce, _, name = token.partition(" ")
    path = Path(name)
    try:
        record = _parse(path.read_bytes())
        if record is None or record.nonce == nonce:  # None: it is being written
            return
    except FileNotFoundError:
        _, record = _newest(path.parent)
    except OSError:  # of a network that is down; the next write reports it
        return
    if record:
        raise DistflowError(
            f"this run has lost {path.parent} to another one, on {record}: it was given up for dead, and ends before it"
            " writes there again"
        )
    raise DistflowError(
        f"run_dir: {path.parent} was emptied or replaced while the run wrote to it ({path.name} is gone), so its"
        " metrics and checkpoints are lost; start it again, and let nothing clean that folder"
    )


class OwnerView:
    """Tells whether the run of a folder is alive, for callers that ask repeatedly."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._changed = folder, b"", 0.0

    def is_alive(self) -> bool | None:
        """Returns None if it cannot be known yet, or the run is of a version without an owner's record."""
        number, record = _newest(self._folder)
        if not number:
            return True if _is_locked(self._folder / LOCK) else None
        alive = record.is_alive(self._folder / LOCK) if record else None
        if alive is not None:
            return alive
        data, now = _read(_record_path(self._folder, number)), time.monotonic()
        first, changed = not self._seen, data != self._seen
        if changed:
            self._seen, self._changed = data, now
        if changed and not first:
            return True
        return None if first or now - self._changed < STALE_S else False


def _lock(folder: Path) -> BinaryIO:
    """Locks the folder where locks work, until the file is closed or this process ends."""
    try:
        lock = open_lock(folder / LOCK)
    except OSError as e:
        raise ConfigError(f"run_dir: {folder / LOCK} cannot be opened: {e.strerror}; remove it") from None
    for _ in range(5):  # a page that shows the run tries the lock for an instant
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # some network file systems cannot lock
            return lock
    lock.close()
    raise ConfigError(_refusal(folder, _newest(folder)[1]))


def _locks_work(lock: BinaryIO) -> bool:
    """Returns whether this process holds the lock: where locks do not work, it could not get it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _refusal(folder: Path, record: Record | None) -> str:
    return f"run_dir: another run is writing to {folder}, on {record or 'an unknown host'}; {_WAY_OUT}"


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"{RECORD}{number}"


def _numbers(folder: Path) -> list[int]:
    with contextlib.suppress(OSError):
        names = [name.removeprefix(RECORD) for name in os.listdir(folder) if name.startswith(RECORD)]
        return sorted(int(name) for name in names if name.isdecimal())
    return []


def _newest(folder: Path) -> tuple[int, Record | None]:
    """Returns the number and content of the newest record; 0 if there is none."""
    number = max(_numbers(folder), default=0)
    while _record_path(folder, number + 1).exists():  # the listing of a network file system may be old
        number += 1
    return number, _parse(_read(_record_path(folder, number))) if number else None


def _read(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return file.read(_SIZE)
    except OSError:
        return b""


def _parse(data: bytes) -> Record | None:
    try:
        return Record(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()[:64]


def _pid_space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0
