"""What is made of data files once per host, in a directory its workers share; it may be deleted at any time."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from distflow.data.balance import Ints
from distflow.errors import DataError

T = TypeVar("T")
Build = Callable[[BinaryIO], None]


class HostCache:
    """In the directory asked for, the user's, or, where that cannot be written, a private temporary one."""

    def __init__(self, asked: Path | None = None) -> None:
        self.folder = _writable(asked)

    def get(self, source: Path, state: Sequence[Any], kind: str, build: Build, read: Callable[[Path], T]) -> T:
        """`read` what `build` wrote for this very state of a file: now, or earlier in any process of this host."""
        key = json.dumps([os.path.abspath(source), kind, *state])
        entry = self.folder / f"{source.stem[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.{kind}"
        with suppress(OSError, ValueError):  # not there, or damaged
            return read(entry)
        part = entry.with_name(entry.name + ".part")
        try:
            with open(entry.with_name(entry.name + ".lock"), "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with suppress(OSError, ValueError):  # another worker was first
                    return read(entry)
                try:
                    with open(part, "wb") as out:
                        build(out)
                        out.flush()
                        os.fsync(out.fileno())
                    os.replace(part, entry)  # whole or not at all
                finally:
                    part.unlink(missing_ok=True)
                return read(entry)
        except OSError as e:
            raise DataError(
                f"{source}: cannot be prepared in {self.folder}: {e}; check the file, and that the cache has room"
                " (it is $XDG_CACHE_HOME/distflow, or ~/.cache/distflow)"
            ) from e


def mapped_ints(entry: Path, last: int) -> Ints:
    """A file of integers, mapped. It must end with `last`, which is written last."""
    ints = np.memmap(entry, np.int64, "r")
    if ints[-1] != last:
        raise ValueError(f"{entry} is damaged")
    return ints


def _writable(asked: Path | None) -> Path:
    private = Path(tempfile.gettempdir()) / f"distflow-{os.getuid()}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "distflow"
    for path in [asked] if asked else [user, private]:
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as probe:
                fcntl.flock(probe, fcntl.LOCK_EX)  # some network file systems cannot lock
            if path != private or path.stat().st_uid == os.getuid():  # anybody can make a directory in /tmp
                return path
    raise DataError(f"{asked or private}: the cache of data files cannot be written there; choose another directory")
