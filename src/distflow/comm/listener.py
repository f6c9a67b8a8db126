"""Accepts the connections of peers, in the midst of strangers who may connect as well.

Anybody on the machine may connect. So strangers are bounded, in number and in time; from one that has not shown the
token, only the bytes of a greeting are read and never a descriptor; and where descriptors run out, the listener waits.
"""

import logging
import os
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from distflow.comm.connections import GREETING, Incoming, keep_alive
from distflow.comm.open_files import too_many_open_files
from distflow.comm.shared_memory import MappedFile
from distflow.errors import DistflowError

logger = logging.getLogger(__name__)
STRANGERS = 256  # connections that have not greeted yet, besides two of every worker
GREETING_S, BUSY_GREETING_S = 30.0, 1.0  # for a greeting; the second where strangers have taken all places
STARVED_S = 60.0  # for which a listener waits for descriptors


@dataclass
class _Stranger:
    """A connection that has not shown the run's token yet. `peer`, `number`: of its greeting, once that was right."""

    since: float
    greeting: bytearray
    peer: int = -1
    number: int = 0


class Listener:
    """Accepts the connections of peers that know the run's token; all others are closed."""

    def __init__(self, address: str, token: bytes, workers: int = 2) -> None:
        self.token = token
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._tcp = socket.create_server((address, 0), family=family, backlog=4096)
        self._sockets = [self._tcp]
        self.unix_name = ""  # "": the system has no abstract socket names
        if hasattr(os, "memfd_create"):
            self.unix_name = f"distflow-{secrets.token_hex(16)}"
            self._sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._sockets[-1].bind(b"\0" + self.unix_name.encode())
            self._sockets[-1].listen(4096)
        for sock in self._sockets:
            sock.setblocking(False)
        self._listens = False
        self._listen(True)
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self._most = min(STRANGERS + 2 * workers, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        self._starved_since: float | None = None

    @property
    def port(self) -> int:
        port: int = self._tcp.getsockname()[1]
        return port

    def fileno(self) -> int:
        return self._selector.fileno()  # readable if any of its sockets is

    def accept(self, label: Callable[[int], str]) -> list[Incoming]:
        """Returns the connections that are ready; `label` names a rank in errors. It is called again within seconds
        while a peer is awaited, also if nothing can be read: sockets may have been full, or descriptors used up."""
        self._forget_old()
        if not self._listens and len(self._strangers) < self._most:
            self._listen(True)
        ready = []
        for key, _ in self._selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock not in self._sockets:
                ready.append(self._greet(sock, label))
                continue
            while (new := self._accept_from(sock)) is not None:
                ready.append(self._greet(new, label))  # most greetings have come with the connection
        return [connection for connection in ready if connection]

    def _listen(self, on: bool) -> None:
        """Begins or ceases to look for connections; meanwhile the kernel keeps them in a queue."""
        if on != self._listens:
            self._listens = on
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ) if on else self._selector.unregister(sock)

    def _accept_from(self, listening: socket.socket) -> socket.socket | None:
        if len(self._strangers) >= self._most:
            self._forget_old()
        if len(self._strangers) >= self._most:
            self._listen(False)
            return None
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as e:
            if (problem := too_many_open_files(e)) is None:
                raise
            self._starve(problem)
            return None
        self._starved_since = None
        sock.setblocking(False)
        self._strangers[sock] = _Stranger(time.monotonic(), bytearray())
        self._selector.register(sock, selectors.EVENT_READ)
        return sock

    def _starve(self, problem: DistflowError) -> None:
        """Frees what strangers hold, and waits for descriptors: others may give theirs back. Raises in the end."""
        for sock in list(self._strangers):
            self._close(sock)
        self._listen(False)
        now = time.monotonic()
        if self._starved_since is None:
            self._starved_since = now
            logger.warning("%s; waiting up to %g s for some to be closed", problem, STARVED_S)
        elif now - self._starved_since > STARVED_S:
            raise problem

    def _forget_old(self) -> None:
        """Closes the connections of strangers that had the time to greet; if all places are taken that is short."""
        limit_s = GREETING_S if len(self._strangers) < self._most else BUSY_GREETING_S
        now = time.monotonic()
        for sock in [s for s, stranger in self._strangers.items() if now - stranger.since > limit_s]:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._strangers[sock]
        sock.close()

    def _greet(self, sock: socket.socket, label: Callable[[int], str]) -> Incoming | None:
        """Reads on in a greeting; returns the connection once it is complete."""
        stranger, memory = self._strangers[sock], None
        try:
            if stranger.peer < 0:
                data = sock.recv(GREETING.size - len(stranger.greeting))  # drops descriptors that come along
                stranger.greeting += data
                if data and len(stranger.greeting) < GREETING.size:
                    return None
                if not self._knows_token(stranger):
                    self._close(sock)
                    return None
            if sock.family == socket.AF_UNIX:
                _, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
                if not fds:
                    self._close(sock)
                    return None
                memory = MappedFile(fds[0])
        except BlockingIOError:
            return None
        except OSError:
            self._close(sock)
            return None
        self._selector.unregister(sock)
        del self._strangers[sock]
        keep_alive(sock)
        return Incoming(stranger.peer, stranger.number, label(stranger.peer), sock, memory)

    def _knows_token(self, stranger: _Stranger) -> bool:
        if len(stranger.greeting) < GREETING.size:
            return False
        token, peer, number = GREETING.unpack(stranger.greeting)
        if not secrets.compare_digest(token, self.token):
            return False
        stranger.peer, stranger.number = peer, number
        return True

    def close(self) -> None:
        self._selector.close()
        for sock in (*self._sockets, *self._strangers):
            sock.close()
