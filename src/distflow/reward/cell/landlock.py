"""Landlock: from here on this process sees only the files it was given. Linux ≥ 5.13, no privilege needed."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

from distflow.reward.cell.system import checked, libc

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many of the rights to files a version knows
_NEVER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15  # to execute, to make devices and sockets, to control devices
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """0 where there is none."""
    return max(0, int(libc.syscall(_CREATE, None, 0, 1)))


def confine(folder: str, readable: Iterable[str]) -> None:
    """Reading is left for `readable`, all that files need for `folder`, nothing for the rest."""
    known = version()
    handled = (1 << _RIGHTS[min(known, 5)]) - 1
    # Rights to files; to bind and connect TCP (4); to signal others and to speak to their abstract sockets (6).
    attributes = struct.pack("QQQ", handled, 0b11 if known >= 4 else 0, 0b11 if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    rules = checked(libc.syscall(_CREATE, ctypes.c_char_p(attributes), size, 0), "landlock")
    try:
        _allow(rules, folder, handled & ~_NEVER)
        for path in readable:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _allow(rules, path, _READ_FILE | _READ_DIR)
        _allow(rules, "/dev/null", _READ_FILE | _WRITE_FILE)
        checked(libc.syscall(_RESTRICT, rules, 0), "landlock")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, fd))
        checked(libc.syscall(_ADD, rules, 1, rule, 0), f"landlock, {path}")
    finally:
        os.close(fd)
