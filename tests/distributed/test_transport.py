"""The transport between real processes: sizes, order, first use from both sides, lost peers, open files."""

import errno
import os
import resource
import signal
import socket
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distflow.comm.collectives import SendReceive, all_gather_bytes, barrier
from distflow.comm.open_files import raise_open_files_limit, too_many_open_files
from distflow.comm.transport import SHARED_MEMORY, Transport
from distflow.errors import DistflowError, PeerLostError
from distflow.plan.topology import Topology
from spawn import make_transport, spawn

both_ways = pytest.mark.parametrize("shared_memory", ["1", "0"])


def swap(transport: Transport, peers: list[int], size: int, value: int, how: str = "") -> torch.Tensor:
    """Sends `size` bytes of this value to each of the peers, and returns what they send, [peers, size].

    `how`: "take" reads it from wherever it is, "pieces" sends it from where it lies.
    """
    out = torch.empty(len(peers) * size, dtype=torch.uint8)
    receive = {p: (i * size, (i + 1) * size) for i, p in enumerate(peers)}
    taken: dict[int, torch.Tensor] = {}

    def read(peer: int, data: torch.Tensor) -> None:
        assert peer not in taken
        taken[peer] = data.clone()

    def pieces(_: int) -> list[memoryview]:
        data = memoryview(bytes([value]) * size)
        return [data[a : a + 10_000] for a in range(0, size, 10_000)]

    send, reads = dict.fromkeys(peers, (0, size)), read if how == "take" else None
    own = pieces if how == "pieces" else None
    transport.execute(SendReceive(size, lambda data: data.fill_(value), send, out, receive, reads, own))
    return torch.stack([taken[p] for p in peers]) if how == "take" else out.view(len(peers), size)


def run_swaps(rank: int, shared_memory: str, topology: Topology, sizes: list[int]) -> int:
    os.environ[SHARED_MEMORY] = shared_memory
    transport = make_transport(rank, 3, topology=topology)
    peers = [r for r in range(3) if r != rank]
    for turn, size in enumerate(sizes):
        for how in ("", "take", "pieces"):
            got = swap(transport, peers, size, 16 * rank + turn, how)
            assert all((row == 16 * p + turn).all() for p, row in zip(peers, got, strict=True)), (turn, size, how)
    assert transport.messages == 3 * 2 * len(sizes)
    assert transport.bytes == 3 * 2 * sum(sizes)
    return transport.connections


@pytest.mark.parametrize(
    ("shared_memory", "topology"),
    [("1", Topology.single(3)), ("0", Topology.single(3)), ("1", Topology((0, 0, 1)))],
    ids=["shared memory", "sockets", "two hosts"],
)
def test_messages_of_any_size_go_both_ways_at_once(shared_memory: str, topology: Topology) -> None:
    """Larger than the buffers of sockets, and alternating with small ones; all connect to all at the same time."""
    sizes = [1, 20 << 20, 4096, 4097, 1, 1 << 20, 8 << 20, 100_000]
    assert spawn(3, run_swaps, shared_memory, topology, sizes) == [4, 4, 4]  # to and from each of the others


def run_ahead(rank: int, shared_memory: str) -> None:
    """Rank 0 only sends, as fast as it can; rank 1 reads later."""
    os.environ[SHARED_MEMORY] = shared_memory
    transport, size, none = make_transport(rank, 2), 10_000, torch.empty(0, dtype=torch.uint8)
    for turn in range(100):
        if rank == 0:
            transport.execute(SendReceive(size, lambda data, t=turn: data.fill_(t), {1: (0, size)}, none, {}))  # type: ignore[misc]
        else:
            if turn == 0:
                time.sleep(0.2)
            out = torch.empty(size, dtype=torch.uint8)
            assert (transport.execute(SendReceive(0, lambda data: None, {}, out, {0: (0, size)})) == turn).all()


@both_ways
def test_a_sender_runs_ahead_and_nothing_is_overwritten(shared_memory: str) -> None:
    spawn(2, run_ahead, shared_memory)


def run_before_and_after_the_topology(rank: int) -> list[bool]:
    """Messages before the topology is known go by TCP; their order is kept when shared memory takes over."""
    store = dist.distributed_c10d._get_default_store()
    transport = Transport(rank, 2, store, "127.0.0.1", torch.device("cpu"), lambda _: nullcontext(), "early")
    none, size = torch.empty(0, dtype=torch.uint8), 50_000
    for turn in range(6):
        if turn == 3:
            transport.use(Topology.single(2))
        if rank == 0:
            transport.execute(SendReceive(size, lambda data, t=turn: data.fill_(t), {1: (0, size)}, none, {}))  # type: ignore[misc]
        else:
            time.sleep(0.1)
            out = torch.empty(size, dtype=torch.uint8)
            assert (transport.execute(SendReceive(0, lambda data: None, {}, out, {0: (0, size)})) == turn).all()
    return [c.shared for c in transport._outgoing.values()]


def test_the_order_is_kept_when_shared_memory_takes_over() -> None:
    assert spawn(2, run_before_and_after_the_topology) == [[True], []]


def run_until_killed(rank: int, shared_memory: str, moment: str) -> str:
    """Rank 1 is a child of its process, which kills it; returns the error of rank 0, which waits for it."""
    os.environ[SHARED_MEMORY] = shared_memory
    size, none = 64 << 20, torch.empty(0, dtype=torch.uint8)
    if rank == 1 and (child := os.fork()):
        time.sleep(0.5)  # until it waits
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return ""
    transport = make_transport(rank, 2)
    if moment != "before it connects":
        transport.run(barrier(rank, range(2)))
    if rank == 1:
        if moment == "in a message":  # which rank 0 does not read
            transport.execute(SendReceive(size, lambda data: None, {0: (0, size)}, none, {}))
        time.sleep(60)
    out = torch.empty(size, dtype=torch.uint8)
    request = SendReceive(0, lambda data: None, {}, out, {1: (0, size)})
    if moment == "in a message":
        time.sleep(1)
        request = SendReceive(size, lambda data: None, {1: (0, size)}, out, {1: (0, size)})
    with pytest.raises(PeerLostError, match="lost rank 1") as e:
        transport.execute(request)
    return str(e.value)


@both_ways
@pytest.mark.parametrize("moment", ["before it connects", "before a message", "in a message"])
def test_a_killed_peer_is_named_at_once(shared_memory: str, moment: str) -> None:
    assert "rank 1" in spawn(2, run_until_killed, shared_memory, moment)[0]


def run_with_stranger(rank: int) -> int:
    """Somebody who does not know the token connects, says something or nothing; the workers do not notice."""
    transport = make_transport(rank, 2)
    strangers = []
    for greeting in (b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n", b"x", b""):
        strangers.append(socket.create_connection(("127.0.0.1", transport._listener.port)))
        strangers[-1].sendall(greeting)
    for turn in range(3):
        assert (swap(transport, [1 - rank], 10_000, 2 * turn + rank) == 2 * turn + 1 - rank).all()
        time.sleep(0.1)
    strangers[0].settimeout(5)
    with pytest.raises(ConnectionResetError):  # it was closed without being read to its end
        strangers[0].recv(1)
    return transport.connections


def test_strangers_are_refused() -> None:
    assert spawn(2, run_with_stranger) == [2, 2]


def run_many(rank: int, workers: int) -> int:
    transport = make_transport(rank, workers)
    texts = transport.run(all_gather_bytes(rank, range(workers), b"x" * rank))
    assert [len(t) for t in texts] == list(range(workers))
    for _ in range(3):
        transport.run(barrier(rank, range(workers)))
    connections: int = transport.connections
    return connections


def test_the_number_of_connections_is_that_of_log_n_peers() -> None:
    """Of 64 workers each is connected to and from 6 by the all-gather, and to its neighbours in the tree."""
    assert max(spawn(64, run_many, 64)) <= 4 * 6


def test_too_few_open_files_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    with pytest.raises(DistflowError, match=r"limit of open files is 200, but a worker of 1024 needs .*ulimit -n"):
        raise_open_files_limit(1024)
    error: Any = too_many_open_files(OSError(errno.EMFILE, "Too many open files"))
    assert "limit of 200 is reached" in str(error)
    assert too_many_open_files(OSError(errno.EPERM, "")) is None
