"""A connection may be used at once: the greeting goes before the first message, and who does not answer is named."""

import array
import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from distflow.comm import listener as listening
from distflow.comm.connections import GREETING, Expected, Incoming, MovedError, Outgoing, connect
from distflow.comm.listener import Listener
from distflow.comm.shared_memory import SendMemory
from distflow.errors import DistflowError, PeerLostError
from limits import wait_until

TOKEN = b"t" * 32


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", TOKEN)
    yield listener
    listener.close()


def connection_to(port: int) -> Outgoing:
    return connect(1, "rank 1", f"127.0.0.1:{port}", GREETING.pack(TOKEN, 0, 0), None)


def accepted(listener: Listener) -> Incoming:
    while not (connections := listener.accept(lambda rank: f"rank {rank}")):
        select.select([listener], [], [], 10)
    return connections[0]


def finish(connection: Outgoing | Incoming) -> None:
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLOUT if isinstance(connection, Outgoing) else select.POLLIN)
    while not connection.progress():
        assert poller.poll(10_000)


def send(port: int, data: bytes) -> None:
    outgoing = connection_to(port)
    outgoing.start([memoryview(data)], len(data), None, 0)
    finish(outgoing)


def test_a_message_follows_the_greeting_of_a_connection_that_was_just_begun(listener: Listener) -> None:
    send(listener.port, b"samples")
    incoming, out = accepted(listener), bytearray(7)
    assert (incoming.peer, incoming.number) == (0, 0)
    incoming.start(Expected(memoryview(out)))
    finish(incoming)
    assert out == b"samples"


def test_a_connection_that_was_never_used_can_be_moved(listener: Listener) -> None:
    connection_to(listener.port).move()
    incoming = accepted(listener)
    incoming.start(Expected(memoryview(bytearray(7))))
    with pytest.raises(MovedError):
        finish(incoming)


def test_a_peer_that_refuses_the_connection_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with pytest.raises(PeerLostError, match="lost rank 1: Connection refused"):
        send(port, b"samples")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def open_files_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def unix_stranger(listener: Listener, stack: ExitStack) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.connect(b"\0" + listener.unix_name.encode())
    return sock


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no descriptors are sent here")
def test_a_stranger_makes_a_listener_hold_no_descriptor(listener: Listener) -> None:
    """Neither with a greeting that is never finished, nor with one byte and one descriptor at a time."""
    with ExitStack() as stack:
        for _ in range(20):
            sock = unix_stranger(listener, stack)
            for _ in range(3):
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
                sock.sendmsg([b"x"], ancillary)
        before = open_files()
        for _ in range(5):
            assert listener.accept(str) == []
        assert open_files() - before <= 20  # the connections themselves


def test_who_greets_with_another_token_is_no_peer(listener: Listener) -> None:
    wrong = bytes(byte ^ 1 for byte in TOKEN)
    found: list[Incoming] = []
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(GREETING.pack(wrong, 7, 0))
        send(listener.port, b"samples")

        def both_are_known() -> bool:
            found.extend(listener.accept(str))
            is_closed = bool(select.select([stranger], [], [], 0)[0])
            return len(found) + is_closed == 2

        wait_until(both_are_known)
        assert [incoming.peer for incoming in found] == [0]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no descriptors are sent here")
def test_a_peer_of_the_same_host_sends_its_memory_after_its_greeting(listener: Listener) -> None:
    memory = SendMemory()
    assert memory.grow(10_000)
    block = memory.allocate(10_000)
    assert block is not None
    memory.view(block)[:] = 7
    greeting = GREETING.pack(TOKEN, 0, 0)
    outgoing = connect(1, "rank 1", listener.unix_name, greeting, memory.file)
    outgoing.start([memory.view(block).data], block.size, block, 0)
    finish(outgoing)
    incoming, out = accepted(listener), bytearray(10_000)
    incoming.start(Expected(memoryview(out)))
    finish(incoming)
    assert out == bytes([7]) * 10_000


def test_strangers_that_say_nothing_neither_pile_up_nor_keep_a_peer_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_most", 20)
    monkeypatch.setattr(listening, "BUSY_GREETING_S", 0.05)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        send(listener.port, b"samples")
        before, out, most = open_files(), bytearray(7), 0
        while not (ready := listener.accept(lambda rank: f"rank {rank}")):
            most = max(most, open_files() - before)
            select.select([listener], [], [], 0.1)
        assert 0 < most <= 20
        ready[0].start(Expected(memoryview(out)))
        finish(ready[0])
    assert out == b"samples"


def test_a_listener_outlives_a_time_without_descriptors(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    send(listener.port, b"samples")
    with open_files_limit(max(map(int, os.listdir("/proc/self/fd"))) + 1), ExitStack() as stack:
        while True:  # there may be gaps
            try:
                stack.callback(os.close, os.dup(0))
            except OSError:
                break
        assert listener.accept(str) == []
        assert "too many open files" in caplog.text
    assert accepted(listener).peer == 0


def test_a_listener_without_descriptors_says_so_in_the_end(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "STARVED_S", -1.0)
    send(listener.port, b"samples")
    with open_files_limit(3):
        listener.accept(str)
        with pytest.raises(DistflowError, match="too many open files: this worker's limit of 3"):
            listener.accept(str)
