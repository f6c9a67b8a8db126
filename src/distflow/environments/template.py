"""The process that children are forked from, seen from the worker. Only `ending` and `kill` wait, and not for long."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import distflow
from distflow.environments.channel import Channel, encode
from distflow.environments.spec import EnvironmentSetupError, EnvironmentSpec

_EXIT_S = 2.0  # how long it may take to exit after it closed its channel or was killed


class Template:
    """Loads `environments`, numbered as the worker numbers them, in the background; forks queue until it is ready."""

    def __init__(
        self,
        python: str,
        environments: Sequence[tuple[int, EnvironmentSpec]],
        base: Path,
        reward_functions: Sequence[Mapping[str, Any]],
        deadline: float,
    ) -> None:
        self.python, self.deadline, self.ready = python, deadline, False
        self._forks: deque[tuple[bytes, int, int]] = deque()
        self.control, theirs = socket.socketpair()
        self._channel = Channel(self.control)
        pipe, self._pipe = os.pipe()  # closes when we die, which ends the template
        fds = (theirs.fileno(), pipe)
        command = [python, "-P", "-u", "-X", "faulthandler", "-m", "distflow.environments.fork_server"]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, (*fds, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what environments print goes to stderr
                pass_fds=fds,
                start_new_session=True,
                env=_process_environment(python),
            )
        except OSError as e:
            self.control.close()
            os.close(self._pipe)
            raise EnvironmentSetupError(
                f"cannot start {python} for environments: {e}; check `environment.python`, or free memory"
            ) from e
        finally:
            theirs.close()
            os.close(pipe)
        self.pid = self._process.pid
        setup = {
            # Import what we can import; another interpreter has packages of its own.
            "path": list(map(str, sys.path)) if python == sys.executable else None,
            "base": str(base),
            "environments": [[i, asdict(e)] for i, e in environments],
            "reward_functions": list(reward_functions),
        }
        self._channel.send(setup)

    def fork(self, serial: int, environment: int, channel: int, pipe: int) -> None:
        """Has a child forked that gets the two descriptors, which are closed here."""
        self._forks.append((encode({"fork": serial, "environment": environment}), channel, pipe))
        self._flush()

    def receive(self) -> Iterator[dict[str, Any]]:
        for message in self._channel.receive():
            if "ready" in message:
                self.ready, self.deadline = True, math.inf
            yield message
        self._flush()

    def ending(self) -> str:
        """Says how the process ended after it closed its channel."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return describe_exit(code)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group is empty
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        for _, channel, pipe in self._forks:
            os.close(channel)
            os.close(pipe)
        self._forks.clear()
        self.control.close()
        os.close(self._pipe)

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


def _process_environment(python: str) -> dict[str, str]:
    """Environments that iterate over sets of strings are the same on every worker and in every run."""
    variables = {"PYTHONHASHSEED": "0", **os.environ}
    if python != sys.executable:  # as if its virtual environment were activated, and we were installed there
        variables["PYTHONPATH"] = str(Path(distflow.__file__).parent.parent)
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return variables
