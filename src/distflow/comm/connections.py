"""Connections between workers: TCP between hosts, Unix sockets with shared memory within one; one per direction.

A message is a header (offset, size) and, over TCP or if it is small, its bytes. The bytes of a large message to a
worker of the same host are in shared memory at that offset; the receiver answers with one byte once it has read them.
Receivers know the size of every message, so bytes go straight to their destination, and messages that are not yet
expected stay in the kernel.
"""

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from distflow.comm.open_files import too_many_open_files
from distflow.comm.shared_memory import Block, MappedFile
from distflow.errors import DistflowError, PeerLostError

GREETING = struct.Struct("=32sqq")  # the run's token, the rank of the sender, the number of its connections before
HEADER = struct.Struct("=qq")  # offset in shared memory, or a constant below; size
INLINE, MOVED = -1, -2  # the bytes follow; the sender goes on with another connection
SMALL = 4096  # bytes that are not worth the detour through shared memory
MAX_PIECES = 64  # that a socket is given at once: it rarely takes more bytes, and the kernel looks at all of them
MAX_UNREAD = 32  # messages in shared memory to one peer: its answers have to fit the socket's buffer
ACKNOWLEDGEMENT = b"\1"
TCP_INFO_BYTES, LAST_DATA_RECEIVED = 64, 52  # of Linux's struct tcp_info; the field is in ms
SYN_RETRIES = 5  # a host that does not answer is given up after a minute
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # errors of TCP whose peer does not answer


class MovedError(Exception):
    """Raised when the sender goes on with another connection."""


class Outgoing:
    """A connection to send to a peer. `unread`: the shared memory blocks that the peer has yet to read, oldest first.

    It may be used before the peer has answered: `greeting` precedes the first message.
    """

    def __init__(self, peer: int, label: str, where: str, sock: socket.socket, shared: bool, greeting: bytes) -> None:
        self.peer, self.label, self.sock, self.shared = peer, label, sock, shared
        self.unread: deque[Block] = deque()
        self._parts: list[memoryview] = []  # of the message, as far as it is not sent
        self._where, self._greeting, self._connected = where, greeting, False

    def fileno(self) -> int:
        return self.sock.fileno()

    def in_shared_memory(self, size: int) -> bool:
        """Returns whether a message of this size goes through shared memory; else it is sent by the socket."""
        return self.shared and size > SMALL

    def start(self, pieces: list[memoryview], size: int, block: Block | None, offset: int) -> None:
        """Begins to send `size` bytes, which are in `pieces`; from `offset` of the block if there is one."""
        if block and self.in_shared_memory(size):
            block.readers += 1
            self.unread.append(block)
            self._parts = [memoryview(HEADER.pack(block.start + offset, size))]
        else:
            self._parts = [memoryview(HEADER.pack(INLINE, size)), *pieces]
        if self._greeting:
            self._parts.insert(0, memoryview(self._greeting))
            self._greeting = b""

    def progress(self) -> bool:
        """Sends as much as the socket takes; returns whether the message is complete."""
        try:
            if not self._is_connected():
                return False
            while self._parts:
                _advance(self._parts, self.sock.sendmsg(self._parts[:MAX_PIECES]))
        except BlockingIOError:
            return False
        except OSError as e:
            raise lost(self.label, e) from e
        return True

    def _is_connected(self) -> bool:
        """Returns whether the peer's host has answered. Raises if it has refused or does not answer at all."""
        if not self._connected:
            try:
                if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                self.sock.getpeername()
            except OSError as e:
                if e.errno == errno.ENOTCONN:
                    return False
                raise unreachable(self.label, self._where, e) from e
            self._connected = True
        return self._connected

    def read_acknowledgements(self) -> None:
        """Marks blocks that the peer has read. Raises if the peer is gone."""
        if not self._is_connected():
            return
        try:
            answer = self.sock.recv(2 * MAX_UNREAD)
        except BlockingIOError:
            return
        except OSError as e:
            raise lost(self.label, e) from e
        if not answer:
            raise lost(self.label)
        for _ in answer:
            self.unread.popleft().readers -= 1

    @property
    def greeted(self) -> bool:
        """Returns whether the peer can know who opened this connection."""
        return not self._greeting

    def move(self) -> None:
        """Closes this connection; further messages to the peer go over a new one."""
        self.sock.setblocking(True)
        self.sock.sendall(self._greeting + HEADER.pack(MOVED, 0))
        self.sock.close()


@dataclass(frozen=True)
class Expected:
    """A message to receive: memory of its size, and optionally a function that reads it where it lies."""

    out: memoryview
    take: Callable[[memoryview], object] | None = None


class Incoming:
    """A connection to receive from a peer, with its shared memory if it is on this host.

    `number`: how many connections from that peer have to be read to their end first.
    """

    def __init__(self, peer: int, number: int, label: str, sock: socket.socket, memory: MappedFile | None) -> None:
        self.peer, self.number, self.label, self.sock, self.memory = peer, number, label, sock, memory
        self._header = bytearray(HEADER.size)
        self._parts: list[memoryview] = []
        self.expected = Expected(memoryview(b""))
        self._checked = self._inline = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def data_age_s(self) -> float | None:
        """Returns how long ago the kernel received data; None if it does not say, as for Unix sockets."""
        if self.sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        except OSError:  # closed meanwhile
            return None
        return struct.unpack_from("=I", info, LAST_DATA_RECEIVED)[0] / 1000 if len(info) == TCP_INFO_BYTES else None

    def start(self, expected: Expected) -> None:
        """Begins to receive a message."""
        self.expected, self._checked, self._inline = expected, False, not self._shared(expected)
        self._parts = [memoryview(self._header)]
        if self._inline:
            self._parts.append(expected.out)

    def progress(self) -> bool:
        """Receives the available bytes; returns whether the message is complete."""
        try:
            while self._parts:
                n = self.sock.recvmsg_into(self._parts)[0]
                if not n:
                    raise lost(self.label)
                if _advance(self._parts, n):
                    self._check()
        except BlockingIOError:
            return False
        except OSError as e:
            raise lost(self.label, e) from e
        if self.expected.take and self._inline:
            self.expected.take(self.expected.out)
        return True

    def _shared(self, expected: Expected) -> bool:
        return self.memory is not None and len(expected.out) > SMALL

    def _check(self) -> None:
        """Reads a complete header, and the shared memory that it points to."""
        if self._checked:
            return
        self._checked = True
        offset, size = HEADER.unpack(self._header)
        if offset == MOVED:
            raise MovedError
        out, take = self.expected.out, self.expected.take
        if size != len(out):
            raise DistflowError(
                f"{self.label} sent {size} bytes where {len(out)} were expected; do all hosts have the same"
                " version of the code?"
            )
        if offset == INLINE and not self._inline:  # the sender has no more shared memory
            self._inline = True
            self._parts.append(out)
        elif self.memory is not None and not self._inline:
            sent = self.memory.view(offset, size).data
            if take:
                take(sent)
            else:
                out[:] = sent
            with suppress(OSError):  # if the peer has ended, its next use reports that
                self.sock.send(ACKNOWLEDGEMENT)


def _advance(parts: list[memoryview], n: int) -> bool:
    """Drops the first n bytes; returns whether a part is complete."""
    complete = 0
    while complete < len(parts) and n >= len(parts[complete]):
        n -= len(parts[complete])
        complete += 1
    del parts[:complete]
    if n:
        parts[0] = parts[0][n:]
    return complete > 0


def lost(label: str, error: OSError | None = None) -> PeerLostError:
    if error and error.errno in SILENT:
        return PeerLostError(
            f"lost {label}: TCP from {socket.gethostname()} to it is broken ({error.strerror}): packets between the two"
            " hosts are lost, at least in one direction"
        )
    return PeerLostError(f"lost {label}: {error.strerror if error else 'it closed its connection'}")


def connect(peer: int, label: str, where: str, greeting: bytes, memory: MappedFile | None) -> Outgoing:
    """Begins to connect to a listener: with `memory`, `where` is the name of its Unix socket, else its host:port.

    Does not wait for a host to answer, so that a worker connects to all its new peers within one round trip.
    """
    try:
        if memory:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(b"\0" + where.encode())
            sock.sendall(greeting)  # first, as a listener takes no descriptor from a stranger
            socket.send_fds(sock, [ACKNOWLEDGEMENT], [memory.fd])
            sock.setblocking(False)
            return Outgoing(peer, label, where, sock, shared=True, greeting=b"")
        host, _, port = where.rpartition(":")
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        keep_alive(sock)
        if hasattr(socket, "TCP_SYNCNT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
        with suppress(BlockingIOError):
            sock.connect(address)
    except OSError as e:
        raise unreachable(label, where, e) from e
    return Outgoing(peer, label, where, sock, shared=False, greeting=greeting)


def unreachable(label: str, where: str, error: OSError) -> DistflowError:
    """Returns the error for a peer that could not be connected to."""
    if isinstance(error, ConnectionError):  # its host answers and the port is closed, so it was open before
        return lost(label, error)
    return too_many_open_files(error) or PeerLostError(
        f"cannot reach {label} at {where}: {error.strerror or error}; check the network between the hosts, and that"
        " firewalls let workers connect to each other on any port"
    )


def keep_alive(sock: socket.socket) -> None:
    """Disables Nagle's algorithm and makes TCP detect a dead host within minutes."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
