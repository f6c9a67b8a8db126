"""The process that children are forked from, seen from the worker. Only `ending` and `kill` wait, and not for long."""

import contextlib
import math
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import distflow
from distflow.agents.spec import EnvironmentSetupError, EnvironmentSpec
from distflow.userproc.channel import Channel, encode
from distflow.userproc.user_process import UserProcess


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
        try:
            self._process = UserProcess("distflow.agents.fork_server", python, _process_environment(python))
        except OSError as e:
            raise EnvironmentSetupError(
                f"cannot start {python} for environments: {e}; check `environment.python`, or free memory"
            ) from e
        self.pid, self.control = self._process.pid, self._process.channel
        self._channel = Channel(self.control)
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
        return self._process.ending() or "closed its channel"

    def kill(self) -> None:
        self._process.kill()
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


def _process_environment(python: str) -> dict[str, str]:
    """Environments that iterate over sets of strings are the same on every worker and in every run."""
    variables = {"PYTHONHASHSEED": "0", **os.environ}
    if python != sys.executable:  # as if its virtual environment were activated, and we were installed there
        variables["PYTHONPATH"] = str(Path(distflow.__file__).parent.parent)
        variables["PATH"] = f"{Path(python).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    return variables
