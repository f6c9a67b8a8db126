"""The channel between a worker and the child of a conversation: one JSON object a line, bounded, over a socket."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

LINE_LIMIT = 8 << 20  # bytes of a message
_CHUNK = 1 << 18

# Operations of a child, each with the fields it must have; a reply follows unless it is in WITHOUT_REPLY.
OPERATIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "begin": {"messages": list},
    "turn": {"messages": list},
    "generate": {"token_ids": list},
    "encode": {"text": str},
    "decode": {"token_ids": list},
    "apply_chat_template": {"messages": list},
    "turn_reward": {"reward": (int, float)},
    "done": {"rewards": dict, "metrics": dict, "extra": dict},
}
WITHOUT_REPLY = frozenset({"turn_reward", "done"})


class BrokenChannelError(Exception):
    """The other side is gone (`ended`), or sent something other than a valid message; the text says which."""

    def __init__(self, reason: str, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def check_message(message: Any) -> dict[str, Any]:
    """Returns the message of a child if it is an operation with its fields; whatever else comes from foreign code."""
    fields = OPERATIONS.get(str(message.get("op"))) if isinstance(message, dict) else None
    if fields is not None and all(isinstance(message.get(name), kind) for name, kind in fields.items()):
        checked: dict[str, Any] = message
        return checked
    raise BrokenChannelError("wrote to the channel of its process; write only to files that it has opened itself")


class Channel:
    """The worker's end; nothing here waits."""

    def __init__(self, end: socket.socket, limit: int = LINE_LIMIT) -> None:
        self.socket, self._limit = end, limit
        self._in, self._out = bytearray(), bytearray()
        end.setblocking(False)

    @property
    def sending(self) -> bool:
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> None:
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
