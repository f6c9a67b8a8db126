"""A connection may be used at once: the greeting goes before the first message, and who does not answer is named."""

import select
import socket
from collections.abc import Iterator

import pytest

from distflow.comm.connections import GREETING, Expected, Incoming, Listener, MovedError, Outgoing, connect
from distflow.errors import PeerLostError

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
    outgoing.start(memoryview(data), None, 0)
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
