"""A process that runs the user's code: it has a channel to us, ends with us, and what it has started ends with it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from distflow.errors import cut

_EXIT_S = 2.0  # how long it may take to exit after it closed its channel or was killed
PACKAGE = str(Path(__file__).parent.parent)  # where our own code is


class UserProcess:
    """Runs a module of ours, which is given the number of its channel, of a pipe that closes when we die, and our pid.

    Raises OSError if it cannot be started. Only `ending` and `kill` wait, and not for long.
    """

    def __init__(self, module: str, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self.channel, theirs = socket.socketpair()
        pipe, self._pipe = os.pipe()
        fds = (theirs.fileno(), pipe)
        try:
            # It leads its own process group, so that whatever the user's code starts is killed with it.
            self._process = subprocess.Popen(
                [python, "-P", "-u", "-X", "faulthandler", "-m", module, *map(str, (*fds, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the user's code prints goes to stderr
                pass_fds=fds,
                start_new_session=True,
                env=env,
            )
        except OSError:
            self.channel.close()
            os.close(self._pipe)
            raise
        finally:
            theirs.close()
            os.close(pipe)
        self.pid = self._process.pid

    def ending(self) -> str | None:
        """Says how the process ended after it closed its channel; None if it goes on without one."""
        try:
            return describe_exit(self._process.wait(_EXIT_S))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kills the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group is empty
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self.channel.close()
        os.close(self._pipe)


def describe_exit(code: int) -> str:
    """Completes a sentence about a process with its exit status, as `subprocess` gives it."""
    if code >= 0:
        return f"exited with {code}"
    hint = " (by a user, or by the system when memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def describe_error(error: BaseException, is_own: Callable[[str], bool]) -> str:
    """Returns type, message and line of an error; the line is in a file that `is_own`, even if a library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_own(f.filename)] or [f for f in frames if not f.filename.startswith(PACKAGE)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    try:
        message = cut(str(error), 300)
    except Exception:  # `__str__` of a user's exception may raise
        message = ""
    return f"{type(error).__name__}{': ' * bool(message)}{message}{place}"
