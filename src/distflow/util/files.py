"""Files that are complete or absent, whatever is killed when. Imports no torch."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: whatever happens, there is the old one or the new one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    fsync(partial)
    partial.rename(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes sure that a file, or the entries of a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
