"""Folders where no other user of the machine can put or replace a file, and which no other can read if they are new."""

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO


def make_private(path: Path) -> None:
    """Makes a folder that only this user may enter; its parents get the usual mode. One that exists stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def why_unsafe(path: Path, parents: bool = False) -> str:
    """Returns why other users could put or replace files in a folder, "" if none can; `parents`: nor the folder itself.

    Root is none of the others.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _owner_of_new_files(path):
        return f"{path} belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o002:
        return f"everybody may write to {path}"
    for parent in path.resolve().parents if parents else ():
        mode = parent.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            return f"other users may rename what is in {parent}"
    return ""


def planted_link(path: Path, depth: int = 40) -> str:
    """Returns which link on the way to a folder another user has made, "" if there is none: it may lead anywhere."""
    current = Path(path.absolute().anchor)
    for part in path.absolute().parts[1:]:
        current /= part
        if not current.is_symlink():
            continue
        if (owner := current.lstat().st_uid) not in (os.geteuid(), 0):
            return f"{current} is a link that another user (uid {owner}) has made, to {os.readlink(current)}"
        if depth and (reason := planted_link(current.parent / os.readlink(current), depth - 1)):
            return reason
    return ""


def _owner_of_new_files(path: Path) -> int:
    """Returns whose the files are that this user makes there: network file systems and containers map users."""
    with tempfile.TemporaryFile(dir=path) as file:
        return os.fstat(file.fileno()).st_uid


def open_lock(path: Path) -> BinaryIO:
    """Opens a file to lock. Refuses a symbolic link and truncates nothing: it may be another user who has made it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
