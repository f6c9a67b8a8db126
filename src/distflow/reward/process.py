"""One process of a reward pool, seen from the pool. Everything but `ending` and `kill` returns without waiting."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from distflow.reward.errors import RewardError

_EXIT_S = 2.0  # how long a process may take to exit after it closed its channel or was killed


class BrokenChannelError(Exception):
    """The process is gone, or sent something other than a valid message."""


class Process:
    """`calls` are the indices of the calls it holds; it runs the first, which must finish by `deadline`."""

    def __init__(self, setup: bytes, deadline: float) -> None:
        self.deadline, self.ready = deadline, False
        self.calls: deque[int] = deque()
        self._in, self._out = b"", bytearray()
        self.channel, child_end = socket.socketpair()
        pipe, self._pipe = os.pipe()  # closes when we die, which ends the child
        fds = (child_end.fileno(), pipe)
        command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "distflow.reward.server"]
        try:
            # It leads its own process group, so that whatever a function starts is killed with it.
            self._child = subprocess.Popen(
                [*command, *map(str, (*fds, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what functions print goes to stderr
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as e:
            self.channel.close()
            os.close(self._pipe)
            raise RewardError(f"cannot start a reward process: {e}; lower `reward.processes`, or free memory") from e
        finally:
            child_end.close()
            os.close(pipe)
        self.pid = self._child.pid
        self.channel.setblocking(False)
        self.queue(setup)
        self.flush()

    @property
    def idle(self) -> bool:
        return self.ready and not self.calls

    @property
    def sending(self) -> bool:
        return bool(self._out)

    def queue(self, message: bytes) -> None:
        self._out += message

    def flush(self) -> None:
        """Sends as much of the queue as the channel takes without blocking."""
        # If the channel is closed, `receive` reports it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self.channel.send(self._out)]

    def receive(self) -> Iterator[Any]:
        """Yields the messages that have arrived completely."""
        try:
            data = self.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise BrokenChannelError
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:  # one by one: messages before an invalid one still count
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise BrokenChannelError from None

    def ending(self) -> str:
        """Says how the process ended after it closed its channel."""
        try:
            code = self._child.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "broke the channel to the pool"
        if code >= 0:
            return f"exited with {code}"
        hint = " (by a user, or by the system when memory ran out)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """Kills the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its process group is empty
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_EXIT_S)
        self.channel.close()
        os.close(self._pipe)
