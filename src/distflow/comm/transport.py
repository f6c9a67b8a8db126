"""Executes messages between workers: own sockets, shared memory within a host, the device's backend on GPUs."""

import os
import re
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.comm.allocator import with_headroom
from distflow.comm.collectives import Communication, SendReceive
from distflow.comm.connections import (
    GREETING,
    MAX_UNREAD,
    Expected,
    Incoming,
    MovedError,
    Outgoing,
    connect,
)
from distflow.comm.listener import Listener
from distflow.comm.open_files import raise_open_files_limit
from distflow.comm.shared_memory import Block, SendMemory
from distflow.comm.streams import CPU, current_stream
from distflow.errors import PeerLostError
from distflow.plan.layout import format_ranks
from distflow.plan.topology import Topology

T = TypeVar("T")

SHARED_MEMORY = "DISTFLOW_SHARED_MEMORY"  # environment variable; 0: send to workers of the same host by TCP, too
PROBE_S = 2.0  # after which a peer that has not yet connected is asked whether it is there


class Transport:
    """Sends to and receives from other workers. Connections are made on first use and kept; one thread may use it.

    Each worker publishes in `store` where it listens, on `address`. Bytes in host memory
    go over its own sockets, and bytes on a device over the backend of that device. `waiting` is entered with the ranks
    that this one waits for.
    """

    def __init__(
        self,
        rank: int,
        workers: int,
        store: dist.Store,
        address: str,
        device: torch.device,
        waiting: Callable[[tuple[int, ...]], AbstractContextManager[None]],
        name: str = "main",
    ) -> None:
        raise_open_files_limit(workers)
        self.rank, self.workers, self.device, self.waiting = rank, workers, device, waiting
        self.messages = self.bytes = 0  # sent
        self.sent: Counter[int] = Counter()  # bytes to each peer, until a reader clears it
        # All ranks that send bytes on devices; each has joined it before: a send joins only the two that take part.
        self.device_group: dist.ProcessGroup | None = None
        self._store = dist.PrefixStore(f"transport/{name}", store)
        # The first worker decides on the token.
        token = self._store.compare_set("token", "", secrets.token_hex(16))
        self._token = token
        self._listener = Listener(address, token, workers)
        host = f"[{address}]" if ":" in address else address
        self._store.set(str(rank), f"{host}:{self._listener.port} {self._listener.unix_name}")
        self._topology = Topology(tuple(range(workers)))  # until it is known: every worker on its own host
        self._host_names: Sequence[str] = ()
        self._memory: SendMemory | None = None  # to send from to workers of this host
        self._buffers: dict[Hashable, Tensor] = {}  # to send from otherwise: one on the CPU, one for each stream
        self._outgoing: dict[int, Outgoing] = {}
        self._moved: Counter[int] = Counter()  # peer → connections to it that were replaced
        self._incoming = _IncomingConnections()

    def use(self, topology: Topology, host_names: Sequence[str] = ()) -> None:
        """Lets workers of this host share memory from now on. `host_names`: by rank, for errors."""
        self._host_names = host_names
        if os.environ.get(SHARED_MEMORY) == "0":
            return
        try:
            self._memory = SendMemory()
        except (AttributeError, OSError):  # not on Linux, or forbidden by a sandbox
            return
        self._topology = topology
        for peer in [p for p in self._outgoing if topology.same_host(self.rank, p)]:
            self._outgoing.pop(peer).move()
            self._moved[peer] += 1

    @property
    def connections(self) -> int:
        """Returns the number of open sockets."""
        return len(self._outgoing) + len(self._incoming.all)

    def data_age_s(self, peer: int) -> float | None:
        """Returns how long ago this host received data of a peer by TCP, None if never. Any thread may call it."""
        ages = [c.data_age_s() for (rank, _), c in list(self._incoming.all.items()) if rank == peer]
        return min((age for age in ages if age is not None), default=None)

    def run(self, communication: Communication[T]) -> T:
        """Runs a generator to its end and executes its requests; returns the generator's result."""
        try:
            request = next(communication)
            while True:
                request = communication.send(self.execute(request))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def execute(self, request: SendReceive) -> Tensor:
        """Returns the filled `out`. The sent bytes may be overwritten later."""
        self.messages += len(request.send)
        for peer, (start, end) in request.send.items():
            self.bytes += end - start
            self.sent[peer] += end - start
        if request.out.device.type != "cpu":
            return self._execute_on_device(request)
        self._connect([peer for peer in request.send if peer not in self._outgoing])
        connections = {peer: self._outgoing[peer] for peer in request.send}
        by_socket = [p for p, (a, b) in request.send.items() if not connections[p].in_shared_memory(b - a)]
        packed = request
        if request.pieces and by_socket:
            packed = _without(request, by_socket)
            for peer in by_socket:
                start, end = request.send[peer]
                connections[peer].start(request.pieces(peer), end - start, None, 0)
        block, data = self._reserve(packed, connections)
        if packed.size:
            packed.pack(data)
        sent = data.numpy().data
        for peer, (start, end) in packed.send.items():
            connections[peer].start([sent[start:end]], end - start, block, start)
        self._complete(connections, {peer: _expected(request, peer) for peer in request.receive})
        return request.out

    def _connect(self, peers: Sequence[int]) -> None:
        """Begins to connect to these peers, all at once."""
        if not peers:
            return
        with self.waiting(tuple(peers)):
            addresses = self._store.multi_get([str(peer) for peer in peers])
        for peer, published in zip(peers, addresses, strict=True):
            address, unix_name = published.decode().split(" ")
            memory = self._memory if unix_name and self._topology.same_host(self.rank, peer) else None
            greeting = GREETING.pack(self._token, self.rank, self._moved[peer])
            self._outgoing[peer] = connect(
                peer, self._label(peer), unix_name if memory else address, greeting, memory.file if memory else None
            )

    def _label(self, peer: int) -> str:
        return f"rank {peer} ({self._host_names[peer]})" if self._host_names else f"rank {peer}"

    def _reserve(self, request: SendReceive, connections: Mapping[int, Outgoing]) -> tuple[Block | None, Tensor]:
        """Returns the memory to pack into, once it is free; with its block if receivers share it."""
        readers = [c for p, (a, b) in request.send.items() if (c := connections[p]).in_shared_memory(b - a)]
        if not self._memory or not request.size or not self._memory.grow(request.size):
            return None, self._send_buffer(request.size, CPU)
        if not readers:  # the same memory, if it is free: fresh pages are slow, and two buffers twice as many
            free = self._memory.allocate(request.size)
            return None, self._send_buffer(request.size, CPU) if free is None else self._view(free)
        while any(len(c.unread) >= MAX_UNREAD for c in readers):
            self._await_readers([c for c in readers if len(c.unread) >= MAX_UNREAD])
        while (block := self._memory.allocate(request.size)) is None:
            self._await_readers([c for c in self._outgoing.values() if c.unread])
        return block, self._view(block)

    def _view(self, block: Block) -> Tensor:
        assert self._memory is not None
        return torch.from_numpy(self._memory.view(block))

    def _await_readers(self, connections: Collection[Outgoing]) -> None:
        """Waits until one of these peers has read something."""
        poller = select.poll()
        by_fd = {c.fileno(): c for c in connections}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        events = poller.poll(0)
        if not events:
            with self.waiting(tuple(sorted(c.peer for c in connections))):
                events = poller.poll()
        for fd, _ in events:
            by_fd[fd].read_acknowledgements()

    def _send_buffer(self, size: int, device: torch.device) -> Tensor:
        key = current_stream(device)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            self._buffers.pop(key, None)  # frees it before there is a larger one
            room = with_headroom(size) if device == CPU else size
            buffer = self._buffers[key] = torch.empty(room, dtype=torch.uint8, device=device)
        return buffer[:size]

    def _complete(self, sends: Mapping[int, Outgoing], receives: dict[int, Expected]) -> None:
        """Progresses all sends and receives together, so that neither their sizes nor their order matter."""
        unfinished = _Unfinished(self._incoming, receives)
        for connection in sends.values():
            unfinished.progress(connection)
        self._accept()
        for peer in list(receives):
            unfinished.receive(peer)
        if not unfinished.peers():
            return
        unfinished.poller.register(self._listener, select.POLLIN)
        probe_at = time.monotonic() + PROBE_S  # by the clock: strangers may cause events all the time
        with self.waiting(unfinished.peers()):
            while unfinished.active or unfinished.awaited:
                events = unfinished.poller.poll(PROBE_S * 1000 if unfinished.awaited else None)
                accept = probe = bool(unfinished.awaited) and time.monotonic() >= probe_at
                for fd, _ in events:
                    if fd == self._listener.fileno():
                        accept = True
                    else:
                        unfinished.progress(unfinished.active[fd])
                if accept:
                    for peer in self._accept() & unfinished.awaited.keys():
                        unfinished.receive(peer)
                if probe:
                    self._probe(unfinished.awaited)
                    probe_at = time.monotonic() + PROBE_S
        self._end_probes()

    def _accept(self) -> set[int]:
        """Accepts connections; returns their peers."""
        new = self._listener.accept(self._label)
        for connection in new:
            self._incoming.all[connection.peer, connection.number] = connection
        return {connection.peer for connection in new}

    def _probe(self, peers: Collection[int]) -> None:
        """Raises if a peer that should connect to this one is gone."""
        for peer in peers:
            if self._store.check([str(peer)]):
                self._connect([] if peer in self._outgoing else [peer])
                self._outgoing[peer].read_acknowledgements()

    def _end_probes(self) -> None:
        """Closes connections that only a probe has needed: one that never greets would be closed as a stranger's."""
        for peer in [p for p, connection in self._outgoing.items() if not connection.greeted]:
            self._outgoing.pop(peer).sock.close()

    def _execute_on_device(self, request: SendReceive) -> Tensor:
        peers = tuple(sorted({*request.send, *request.receive}))
        if not peers:
            return request.out
        data = self._send_buffer(request.size, request.out.device)
        if request.size:
            request.pack(data)
        group, out = self.device_group, request.out
        operations = [dist.P2POp(dist.isend, data[a:b], peer, group) for peer, (a, b) in request.send.items()]
        operations += [dist.P2POp(dist.irecv, out[a:b], peer, group) for peer, (a, b) in request.receive.items()]
        with self.waiting(peers), report_lost_peers(peers):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if request.take:
            for peer, (start, end) in request.receive.items():
                request.take(peer, request.out[start:end])
        return request.out

    def close(self) -> None:
        self._listener.close()
        connections: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.all.values()]
        for connection in connections:
            connection.sock.close()


def _without(request: SendReceive, peers: Collection[int]) -> SendReceive:
    """Returns the request to send to all but these peers; the others' pieces are packed one after the other."""
    assert request.pieces is not None
    send, size, pieces = {}, 0, request.pieces
    for peer, (start, end) in request.send.items():
        if peer not in peers:
            send[peer] = size, size + end - start
            size += end - start

    def pack(out: Tensor) -> None:
        memory = out.numpy().data
        for peer, (at, _) in send.items():
            for piece in pieces(peer):
                memory[at : at + len(piece)] = piece
                at += len(piece)

    return replace(request, size=size, pack=pack, send=send)


def _expected(request: SendReceive, peer: int) -> Expected:
    (start, end), take = request.receive[peer], request.take
    out = request.out.numpy().data[start:end]
    return Expected(out, None if take is None else lambda sent: take(peer, torch.frombuffer(sent, dtype=torch.uint8)))


class _IncomingConnections:
    """The connections from other workers, by peer and number; a peer's are read one after the other."""

    def __init__(self) -> None:
        self.all: dict[tuple[int, int], Incoming] = {}
        self._moved: Counter[int] = Counter()

    def get(self, peer: int) -> Incoming | None:
        """Returns the connection to read from now."""
        return self.all.get((peer, self._moved[peer]))

    def drop(self, connection: Incoming) -> None:
        self.all.pop((connection.peer, connection.number)).sock.close()
        self._moved[connection.peer] += 1


class _Unfinished:
    """The rest of a request: `active` connections by file descriptor, and `awaited` peers, not yet connected."""

    def __init__(self, incoming: _IncomingConnections, awaited: dict[int, Expected]) -> None:
        self.incoming, self.awaited = incoming, awaited
        self.active: dict[int, Outgoing | Incoming] = {}
        self.poller = select.poll()

    def peers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.awaited, *(c.peer for c in self.active.values())}))

    def receive(self, peer: int) -> None:
        """Begins to receive from a peer if there is a connection from it."""
        if connection := self.incoming.get(peer):
            connection.start(self.awaited.pop(peer))
            self.progress(connection)

    def progress(self, connection: Outgoing | Incoming) -> None:
        fd = connection.fileno()
        moved = False
        try:
            done = connection.progress()
        except MovedError:
            done = moved = True
        if not done:
            if fd not in self.active:
                self.active[fd] = connection
                self.poller.register(fd, select.POLLOUT if isinstance(connection, Outgoing) else select.POLLIN)
            return
        if self.active.pop(fd, None):
            self.poller.unregister(fd)
        if moved and isinstance(connection, Incoming):
            self.incoming.drop(connection)
            self.awaited[connection.peer] = connection.expected
            self.receive(connection.peer)


@contextmanager
def report_lost_peers(ranks: tuple[int, ...]) -> Iterator[None]:
    """Turns the error of a collective among these ranks into a PeerLostError that names them."""
    try:
        yield
    except RuntimeError as e:  # gloo and NCCL raise no other type when a peer is gone
        raise PeerLostError(f"lost one of ranks {format_ranks(ranks)}: {short_message(e)}") from e


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether a collective inside a node failed because a peer is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def short_message(error: BaseException) -> str:
    """Returns the first sentence of a backend's error message, without the location in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition(". ")[0].partition("\n")[0]
