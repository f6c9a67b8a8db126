"""Short messages by TCP, one per connection, for where UDP does not arrive: none of them ever makes its sender wait.

Anybody who reaches the port may connect: what is read before its sender is known is bounded in bytes, time and number.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Literal

MAX_BYTES = 4096  # of a message
MOST = 64  # connections at once, in either direction
LIMIT_S = 5.0  # for a message to come or to go
PAUSE_S = 1.0  # without accepting, where descriptors or places are used up

# Of a host where a message was sent: it was taken, the port is closed, nothing came back.
Reach = Literal["connected", "refused", "no answer"]


@dataclass
class _Message:
    """A message on its way; `to`: its address, "" if it is received."""

    data: bytearray
    until: float
    to: str = ""


class TcpMessages:
    """Sends and receives; `selector` tells its owner when `progress` has something to do."""

    def __init__(self, host: str, selector: selectors.BaseSelector) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.reach: dict[str, Reach] = {}  # what the last message to an address has met
        self._selector = selector
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        self.address = json.dumps(self._listener.getsockname()[:2])
        self._messages: dict[socket.socket, _Message] = {}
        self._paused_until = 0.0  # 0: it accepts
        selector.register(self._listener, selectors.EVENT_READ)

    def owns(self, sock: object) -> bool:
        return sock is self._listener or sock in self._messages

    def send(self, address: str, data: bytes) -> None:
        """Begins to send, unless a message to this address is still on its way."""
        on_their_way = [message.to for message in self._messages.values() if message.to]
        if address in on_their_way or len(on_their_way) >= MOST:
            return
        with contextlib.suppress(OSError, ValueError):
            host, port = json.loads(address)
            sock = socket.socket(self._listener.family, socket.SOCK_STREAM)
            self._messages[sock] = _Message(bytearray(data), time.monotonic() + LIMIT_S, address)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_WRITE)
            if (error := sock.connect_ex((host, port))) not in (0, errno.EINPROGRESS):
                self._fail(sock, error)

    def progress(self, sock: socket.socket) -> list[bytes]:
        """Goes on with a socket that is ready; returns the messages that are complete."""
        if sock is self._listener:
            self._accept()
            return []
        message = self._messages.get(sock)
        if message is None:  # closed meanwhile
            return []
        try:
            if message.to:
                if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._fail(sock, error)
                    return []
                del message.data[: sock.send(message.data)]
                if not message.data:
                    self.reach[message.to] = "connected"
                    self._close(sock)
                return []
            data = sock.recv(MAX_BYTES + 1 - len(message.data))
        except BlockingIOError:
            return []
        except OSError as e:
            self._fail(sock, e.errno or 0)
            return []
        message.data += data
        if data and len(message.data) <= MAX_BYTES:
            return []
        self._close(sock)
        return [] if data else [bytes(message.data)]

    def tick(self) -> None:
        """Gives up what takes too long; accepts again after a pause."""
        now = time.monotonic()
        for sock, message in list(self._messages.items()):
            if now > message.until:
                if message.to:
                    self.reach[message.to] = "no answer"
                self._close(sock)
        if self._paused_until and now > self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        for sock in (self._listener, *self._messages):
            sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._pause()
            return
        sock.setblocking(False)
        self._messages[sock] = _Message(bytearray(), time.monotonic() + LIMIT_S)
        self._selector.register(sock, selectors.EVENT_READ)
        if sum(not message.to for message in self._messages.values()) >= MOST:
            self._pause()

    def _pause(self) -> None:
        """Stops to accept: the kernel queues further connections, and open ones keep the time of the pause."""
        for sock in [s for s, message in self._messages.items() if not message.to]:
            self._messages[sock].until = min(self._messages[sock].until, time.monotonic() + PAUSE_S / 2)
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S

    def _fail(self, sock: socket.socket, error: int) -> None:
        if to := self._messages[sock].to:
            self.reach[to] = "refused" if error == errno.ECONNREFUSED else "no answer"
        self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)
        del self._messages[sock]
        sock.close()
