"""Temporary folders that are found and removed if the process that made them was killed.

The process holds a lock on the folder, which the kernel releases however the process ends, and whatever its id.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
_NAME = re.compile(r"distflow-(run|jail)-[0-9a-f]{20}")  # such folders are locked while they are in use
MEMORY = Path("/dev/shm")


@contextmanager
def temporary_folder(where: Path) -> Iterator[Path]:
    """Makes a folder that only this user may enter, and removes it afterwards."""
    path, held = _make(where)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _make(where: Path) -> tuple[Path, int]:
    """Makes a folder, and opens and locks it."""
    while True:
        path = where / f"distflow-run-{secrets.token_hex(10)}"
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # another process took it for a left-over one: make another
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # where folders cannot be locked, none is removed
                fcntl.flock(held, fcntl.LOCK_EX)
            if path.exists():
                return path, held
            os.close(held)


def place_in_memory(size: int = 0) -> Path:
    """Returns where small temporary files are best: in memory, if there is such a folder with room for `size` bytes."""
    if os.access(MEMORY, os.W_OK | os.X_OK):
        try:
            with tempfile.TemporaryFile(dir=MEMORY) as probe:
                if size:
                    os.posix_fallocate(probe.fileno(), 0, size)
            return MEMORY
        except OSError as e:
            logger.warning(
                "%s: cannot be written (%s); the workers' records are in a temporary folder", MEMORY, e.strerror
            )
    return Path(tempfile.gettempdir())


def remove_leftovers(*places: Path) -> list[Path]:
    """Removes this user's folders whose process is gone, by default wherever they may be; returns their paths."""
    removed = []
    for place in places or {MEMORY, Path(tempfile.gettempdir())}:
        with contextlib.suppress(OSError):
            removed += [path for path in sorted(place.iterdir()) if _NAME.fullmatch(path.name) and _remove(path)]
    return removed


def _remove(path: Path) -> bool:
    """Removes a folder unless a process holds it, or it is another user's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.chmod(path, 0o700)  # a jail may not write to its own
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except OSError:
        return False
    finally:
        os.close(fd)
