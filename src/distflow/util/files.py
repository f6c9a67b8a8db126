"""Files that are complete or absent, whatever is killed when. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
