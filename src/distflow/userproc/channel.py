"""The channel between a worker and a process of users' code: one JSON object a line, bounded, over a socket."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

LINE_LIMIT = 8 << 20  # bytes of a message
_CHUNK = 1 << 18


class BrokenChannelError(Exception):
    """The other side is gone (`ended`), or sent something other than a valid message; the text says which."""

    def __init__(self, reason: str, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


def encode(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Channel:
    """The worker's end; nothing here waits."""

    def __init__(self, end: socket.socket, limit: int = LINE_LIMIT) -> None:
        self.socket, self._limit = end, limit
        self._in, self._out = bytearray(), bytearray()
        end.setblocking(False)

    @property
    def sending(self) -> bool:
        return bool(self._out)

    def send(self, message: Any) -> None:
        self._out += encode(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes now."""
        # If it is closed, `receive` reports it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                with memoryview(self._out) as view:
                    sent = self.socket.send(view[:_CHUNK])
                del self._out[:sent]

    def receive(self) -> Iterator[Any]:
        """Yields the messages that have arrived completely."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise BrokenChannelError("closed the channel of its process", ended=True)
        start = len(self._in)
        self._in += data
        while (end := self._in.find(b"\n", start)) >= 0:
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            start = 0
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise BrokenChannelError("wrote something other than JSON to the channel of its process") from None
        if len(self._in) > self._limit:
            self._in.clear()
            raise BrokenChannelError(f"sent a message above {self._limit >> 20} MiB; return less text at once")

    def close(self) -> None:
        self.socket.close()
