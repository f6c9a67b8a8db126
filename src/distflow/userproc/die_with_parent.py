"""Ends a process when its parent dies, together with every process it has started."""

import ctypes
import fcntl
import os
import select
import signal
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(pipe: int, parent: int) -> None:
    """Kills this process group once `parent`, which holds the only write end of `pipe`, is gone.

    Call it once, from the main thread of the group leader, before any code that might hang.
    """

    def check_parent(*_: Any) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    if sys.platform == "linux":
        # The kernel sends the signal when the pipe closes, so it works even while C code keeps Python from running.
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
        # A fork of the parent may keep the pipe open; this signal arrives nevertheless. It also arrives when the
        # parent merely ends the thread that started this process, hence the check.
        signal.signal(signal.SIGHUP, check_parent)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    else:
        threading.Thread(target=lambda: (os.read(pipe, 1), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    if select.select([pipe], [], [], 0)[0]:  # the parent died before the handlers were installed
        os.killpg(0, signal.SIGKILL)
    check_parent()
