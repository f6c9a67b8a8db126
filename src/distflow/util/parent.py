"""Ends a process when the one that launched it is gone. Imports nothing heavy: a worker calls it before all else."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PARENT = "DISTFLOW_PARENT"  # environment variable, set by a launcher for its workers: its own pid
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_FIRST_PARENT = os.getppid()


def end_with_parent() -> None:
    """Makes this process end with the launcher that started it, at once if that is gone already."""
    parent = int(os.environ.pop(PARENT, "0"))  # not for the processes that this one starts
    if not parent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        _in_thread(lambda: _poll_parent(parent), lambda: os.kill(os.getpid(), signal.SIGKILL))
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def watch_ancestor(variable: str, on_end: Callable[[int], None]) -> int:
    """Calls `on_end(pid)` in a thread once the launcher is gone that gave this process an environment variable.

    That is the nearest ancestor without the variable: those between are scripts around this process. Returns its pid.
    """
    pid = os.getppid()
    if pid != _FIRST_PARENT:
        _in_thread(lambda: None, lambda: on_end(_FIRST_PARENT))
        return _FIRST_PARENT
    while sys.platform == "linux" and pid > 1 and _was_given(pid, variable):
        pid = process_status(pid)[1]
    try:
        watched = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, an older kernel, or it is gone
        _in_thread(lambda: _poll_process(pid), lambda: on_end(pid))
    else:
        _in_thread(lambda: select.select([watched], [], []), lambda: on_end(pid))
    return pid


def process_exists(pid: int, started: int = 0) -> bool:
    """Returns whether a process is there and no zombie; `started`: what `process_status` said of it, 0 if unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, _, now = process_status(pid)
    return state not in ("Z", "X") and started in (0, now)


def process_status(pid: int) -> tuple[str, int, int]:
    """Returns the state of a process, its parent, and when it started, in ticks since boot; zeros if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", 0, 0
    return fields[0], int(fields[1]), int(fields[19])


def _was_given(pid: int, variable: str) -> bool:
    try:
        return f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # of another user, as a scheduler's process may be
        return False


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)


def _poll_process(pid: int) -> None:
    while process_exists(pid):
        time.sleep(_POLL_S)


def _in_thread(wait: Callable[[], object], then: Callable[[], None]) -> None:
    def run() -> None:
        wait()
        then()

    threading.Thread(target=run, name="parent", daemon=True).start()
