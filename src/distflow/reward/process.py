"""One child that scores, as the pool sees it. Nothing here waits for the child, but for its end."""

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

_END_S = 2.0  # how long a process that has closed its line, or was killed, may take to end


class BrokenLineError(Exception):
    """The child is gone, or says what nobody understands."""


class Process:
    """`calls` are the numbers of those it was given; it is busy with the first, which must be done by `deadline`."""

    def __init__(self, setup: bytes, deadline: float) -> None:
        self.deadline, self.ready = deadline, False
        self.calls: deque[int] = deque()
        self._in, self._out = b"", bytearray()
        self.line, theirs = socket.socketpair()
        life, self._life = os.pipe()
        fds = (theirs.fileno(), life)
        command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "distflow.reward.server"]
        try:
            # A group of its own, so that what a function starts can be killed with it; prints go to stderr.
            self._child = subprocess.Popen(
                [*command, *map(str, (*fds, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError as e:
            self.line.close()
            os.close(self._life)
            raise RewardError(f"cannot start a reward process: {e}; lower reward.processes, or free memory") from e
        finally:
            theirs.close()
            os.close(life)
        self.pid = self._child.pid
        self.line.setblocking(False)
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
        """Send of what is queued as much as there is room for."""
        # If the line is closed, `receive` will tell.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self.line.send(self._out)]

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived in full."""
        try:
            data = self.line.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise BrokenLineError
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:  # one by one: what comes before rubbish is good
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise BrokenLineError from None

    def ending(self) -> str:
        """How it ended by itself, after its line was closed."""
        try:
            code = self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "left its line to us broken"
        if code >= 0:
            return f"exited with {code}"
        hint = " (by hand, or by the system for lack of memory)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there is nobody left in its group
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        self.line.close()
        os.close(self._life)
