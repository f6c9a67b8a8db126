"""Files that are complete or absent, whatever is killed when. Imports no torch."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from distflow.util.text import human_bytes

PARTIAL = ".part"  # end of the name of what is not complete


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends; after an error the old one stays."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: whatever happens, there is the old one or the new one."""
    with replacing(path) as file:
        file.write(text.encode())


def fsync(path: Path) -> None:
    """Makes sure that a file, or the entries of a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def way_out(folder: Path, error: BaseException | str) -> str:
    """Returns what to do about a write in a folder that failed."""
    full = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    if not any(text in str(error) for text in full):
        return f"see to it that {folder} can be written"
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return f"make room in {folder}, where {human_bytes(shutil.disk_usage(existing).free)} are free"
