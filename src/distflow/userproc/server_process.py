"""A fork server, seen from the worker: it loads users' code once, and forks a process of it on request.

Only `ending` and `kill` wait, and not for long.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.errors import PACKAGE, DistflowError
from distflow.userproc.channel import Channel, encode

_EXIT_S = 2.0  # how long it may take to exit after it closed its channel or was killed


@dataclass(frozen=True)
class UserCode:
    """Users' code, and the module of ours that runs it.

    In the fork server, `module.prepare(arguments)` returns what all processes share, and an answer for the worker. In
    each process, `module.serve(shared, channel)` serves the worker.
    """

    module: str
    arguments: Mapping[str, Any]
    names: str  # how errors about the code begin
    cure: str  # if its interpreter cannot be started
    python: str = sys.executable


class ServerProcess:
    """Starts the fork server, which loads the program in the background; forks queue until it is ready.

    Raises `error` if it cannot be started.
    """

    def __init__(self, program: UserCode, load_limit_s: float, error: type[DistflowError]) -> None:
        self.program, self.deadline, self.ready = program, time.monotonic() + load_limit_s, False
        self._forks: deque[tuple[bytes, int, int]] = deque()
        self.control, theirs = socket.socketpair()
        pipe, self._pipe = os.pipe()
        fds = (theirs.fileno(), pipe)
        try:
            # It leads its own process group, so that whatever the user's code starts is killed with it.
            self._process = subprocess.Popen(
                [program.python, "-P", "-u", "-X", "faulthandler", "-m", "distflow.userproc.fork_server"]
                + [str(number) for number in (*fds, os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the user's code prints goes to stderr
                pass_fds=fds,
                start_new_session=True,
                env=_variables(program.python),
            )
        except OSError as e:
            self.control.close()
            os.close(self._pipe)
            raise error(f"{program.names}: cannot start {program.python}: {e}; {program.cure}, or free memory") from e
        finally:
            theirs.close()
            os.close(pipe)
        self.pid = self._process.pid
        self._channel = Channel(self.control)
        # Import what we can import; another interpreter has packages of its own.
        path = list(map(str, sys.path)) if program.python == sys.executable else None
        self._channel.send({"path": path, "module": program.module, "arguments": dict(program.arguments)})

    def fork(self, serial: int, channel: int, pipe: int) -> None:
        """Has a process forked that gets the two descriptors, which are closed here."""
        self._forks.append((encode({"fork": serial}), channel, pipe))
        self._flush()

    def receive(self) -> Iterator[dict[str, Any]]:
        for message in self._channel.receive():
            if "ready" in message:
                self.ready, self.deadline = True, math.inf
            yield message
        self._flush()

    def ending(self) -> str:
        """Says how the server ended after it closed its channel."""
        try:
            return describe_exit(self._process.wait(_EXIT_S))
        except subprocess.TimeoutExpired:
            return "closed its channel"

    def kill(self) -> None:
        """Kills the server and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group is empty
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self.control.close()
        os.close(self._pipe)
        for _, channel, pipe in self._forks:
            os.close(channel)
            os.close(pipe)
        self._forks.clear()

    def _flush(self) -> None:
        # If the socket is closed, `receive` reports it; if it is full, the next message from there sends the rest.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.ready and self._forks:
                line, channel, pipe = self._forks[0]
                socket.send_fds(self.control, [line], [channel, pipe])
                self._forks.popleft()
                os.close(channel)
                os.close(pipe)


def describe_exit(code: int) -> str:
    """Completes a sentence about a process with its exit status, as `subprocess` gives it."""
    if code >= 0:
        return f"exited with {code}"
    hint = " (by a user, or by the system when memory ran out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _variables(python: str) -> dict[str, str]:
    """Returns the environment of the server: sets of strings are iterated in the same order on every worker."""
    variables = {"PYTHONHASHSEED": "0", **os.environ}
    if python != sys.executable:  # as if its virtual environment were activated, and we were installed there
        variables["PYTHONPATH"] = str(Path(PACKAGE).parent)
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return variables
