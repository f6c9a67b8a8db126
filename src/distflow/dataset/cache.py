"""A cache of files derived from the data files, shared by all workers of a host. It may be deleted at any time."""

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

from distflow.errors import DataError
from distflow.util.arrays import Ints
from distflow.util.files import replacing
from distflow.util.private_folder import make_private, open_lock, why_unsafe

T = TypeVar("T")
Build = Callable[[BinaryIO], None]


class HostCache:
    """Uses the given directory, or the user's cache, or a private temporary directory if that is not writable, or if
    other users could write to it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _writable(folder)

    def get(self, source: Path, state: Sequence[Any], kind: str, build: Build, read: Callable[[Path], T]) -> T:
        """Reads the entry of a source file in this state; the first process of the host calls `build` to write it."""
        key = json.dumps([os.path.abspath(source), kind, *state])
        entry = self.folder / f"{source.stem[:40]}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.{kind}"
        with suppress(OSError, ValueError):  # missing or damaged
            return read(entry)
        try:
            with open_lock(entry.with_name(entry.name + ".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with suppress(OSError, ValueError):  # another worker was first
                    return read(entry)
                with replacing(entry) as out:
                    build(out)
                return read(entry)
        except OSError as e:
            raise DataError(
                f"{source}: cannot be prepared in {self.folder}: {e}; check the file and the free space of the cache"
                " ($XDG_CACHE_HOME/distflow, or ~/.cache/distflow)"
            ) from e


def mapped_ints(entry: Path, last: int) -> Ints:
    """Maps a file of integers; the file is damaged unless it ends with `last`."""
    ints = np.memmap(entry, np.int64, "r")
    if ints[-1] != last:
        raise ValueError(f"{entry} is damaged")
    return ints


def _writable(folder: Path | None) -> Path:
    private = Path(tempfile.gettempdir()) / f"distflow-{os.getuid()}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "distflow"
    reason = "it cannot be written"
    for path in [folder] if folder else [user, private]:
        with suppress(OSError):
            make_private(path)
            with tempfile.TemporaryFile(dir=path) as probe:
                fcntl.flock(probe, fcntl.LOCK_EX)  # some network file systems cannot lock
            if not (reason := why_unsafe(path, parents=True)):  # rows could be planted there
                return path
    raise DataError(
        f"{folder or private}: the cache of data files cannot be there: {reason}; choose another directory"
        " (XDG_CACHE_HOME)"
    )
