"""One process of a reward pool, seen from the pool. Everything but `ending` and `kill` returns without waiting."""

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from distflow.reward.errors import RewardError
from distflow.userproc.user_process import UserProcess


class BrokenChannelError(Exception):
    """The process is gone, or sent something other than a valid message."""


class Process:
    """`calls` are the indices of the calls it holds; it runs the first, which must finish by `deadline`."""

    def __init__(self, setup: bytes, deadline: float) -> None:
        self.deadline, self.ready = deadline, False
        self.calls: deque[int] = deque()
        self._in, self._out = b"", bytearray()
        try:
            self._process = UserProcess("distflow.reward.server")
        except OSError as e:
            raise RewardError(f"cannot start a reward process: {e}; lower `reward.processes`, or free memory") from e
        self.pid, self.channel = self._process.pid, self._process.channel
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
        return self._process.ending() or "broke the channel to the pool"

    def kill(self) -> None:
        """Kills the process and everything it has started."""
        self._process.kill()
