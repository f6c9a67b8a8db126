"""Landlock: restricts this process to the files it is given. Needs Linux ≥ 5.13 and no privilege."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Collection, Iterable, Iterator

from distflow.sandbox.jail.system import check, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # file rights known to each version of the ABI
_NEVER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15  # execute, make devices and sockets, ioctl on devices
_FILE_RIGHTS = _WRITE_FILE | _READ_FILE | _TRUNCATE


def version() -> int:
    """Returns the version of the kernel's Landlock ABI; raises OSError if it has none, or refuses it."""
    return check(libc.syscall(_CREATE_RULESET, None, 0, 1), "landlock")


def make_ruleset(abi: int, folder: str, readable: Iterable[str]) -> int:
    """Returns the descriptor of rules: read access to `readable`, full access to `folder`, none to other files."""
    handled = (1 << _RIGHTS[min(abi, 5)]) - 1
    # File rights; TCP bind and connect (ABI 4); signals and abstract sockets of other processes (ABI 6).
    attributes = struct.pack("QQQ", handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0), "landlock")
    _allow(ruleset, folder, handled & ~_NEVER)
    for path in readable:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    return ruleset


def restrict(ruleset: int) -> None:
    """Restricts this process to the rules for good."""
    check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")


def without(folder: str, hidden: Collection[str]) -> Iterator[str]:
    """Yields what to allow so that a folder is readable without the paths `hidden`: rules can only add."""
    if not any(path.startswith(f"{folder}/") for path in hidden):
        yield folder
        return
    with os.scandir(folder) as entries:  # a link is readable if the file is to which it leads
        shown = [e.path for e in entries if e.path not in hidden and not e.is_symlink()]
    for path in shown:
        yield from without(path, hidden)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, fd))
        check(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"landlock, {path}")
    finally:
        os.close(fd)
