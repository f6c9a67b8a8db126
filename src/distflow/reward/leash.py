"""Die with the parent, and take along whatever this process has started."""

import ctypes
import fcntl
import os
import select
import signal
import sys
import threading
from typing import Any


def hold(life: int, parent: int) -> None:
    """Kill this process group when `parent` is gone, which holds the only writing end of the pipe `life`.

    Call it once, from the main thread of the leader of the group, before any code that might hang.
    """

    def look(*_: Any) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    if sys.platform == "linux":
        # The system itself kills the group when the pipe breaks: also while code in C keeps Python from running.
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        # A fork of the parent may keep the pipe whole. This signal comes even so, but also when the parent merely
        # ends the thread that started us.
        signal.signal(signal.SIGHUP, look)
        ctypes.CDLL(None).prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=lambda: (os.read(life, 1), os.killpg(0, signal.SIGKILL)), daemon=True).start()
    if select.select([life], [], [], 0)[0]:  # it broke before we listened
        os.killpg(0, signal.SIGKILL)
    look()
