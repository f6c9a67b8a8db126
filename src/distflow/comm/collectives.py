"""Collectives in log N rounds, made of one primitive: send bytes to some peers, receive bytes from some peers.

Does no I/O: the generators yield `SendReceive` requests and get back the filled `out`. On a worker the transport
executes them (transport.py); tests run N of them against each other in one process.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from distflow.plan.topology import Topology

T = TypeVar("T")
Range = tuple[int, int]  # [from, to)
Take = Callable[[int, Tensor], object]  # reads the bytes of a peer


@dataclass(frozen=True)
class SendReceive:
    """A request to send bytes to some peers and receive bytes from some. No rank sends to itself, or zero bytes."""

    size: int  # bytes that `pack` fills
    pack: Callable[[Tensor], object]  # writes the bytes straight into the memory that they are sent from
    send: Mapping[int, Range]  # peer → its part of the packed bytes; parts may overlap: packed once, sent to many
    out: Tensor  # uint8, in host memory or on a device
    receive: Mapping[int, Range]  # peer → the part of `out` that it fills
    # Called with each peer's bytes as they come, perhaps in the peer's shared memory; `out` may then stay unfilled.
    take: Take | None = None
    # Returns the bytes for a peer where they lie, as `pack` would copy them, so that a socket sends them from there.
    pieces: Callable[[int], list[memoryview]] | None = None


Communication = Generator[SendReceive, Tensor, T]  # returns T


def all_gather(rank: int, ranks: Sequence[int], data: Tensor) -> Communication[Tensor]:
    """Returns the `data` of all ranks, [ranks, *data.shape], which has the same shape and dtype everywhere.

    Takes ceil(log2 n) rounds, one message each.
    """
    n, place = len(ranks), ranks.index(rank)
    row = data.contiguous().view(-1).view(torch.uint8)
    gathered = row.new_empty(n, len(row))  # row k is that of the rank k places after this one
    gathered[0] = row
    yield from all_gather_pieces(ranks, place, [1] * n, len(row), gathered.view(-1))
    return gathered.roll(place, 0).view(-1).view(data.dtype).view(n, *data.shape)


def all_gather_pieces(
    ranks: Sequence[int], place: int, counts: Sequence[int], unit: int, data: Tensor, radix: int = 2
) -> Communication[None]:
    """Gathers the pieces of all ranks in `data`, where this rank's come first, then the next rank's, in a circle.

    `counts` are the pieces of each rank, from this one on, of `unit` bytes. Bruck's algorithm: in each of log(n) rounds
    (to the base `radix`) every rank passes on the pieces it has so far, to radix − 1 others.
    """
    n, have = len(ranks), 1
    ends = [unit * count for count in accumulate(map(int, counts), initial=0)]
    while have < n:
        send, receive = {}, {}
        for distance in range(have, min(n, radix * have), have):
            blocks = min(have, n - distance)
            if ends[blocks]:
                send[ranks[(place - distance) % n]] = 0, ends[blocks]
            if ends[distance] < ends[distance + blocks]:
                receive[ranks[(place + distance) % n]] = ends[distance], ends[distance + blocks]
        size = max((end for _, end in send.values()), default=0)
        if send or receive:
            yield SendReceive(size, lambda out, own=data[:size]: out.copy_(own), send, data, receive)  # type: ignore[misc]
        have *= radix


def all_gather_by_host(
    rank: int, ranks: Sequence[int], data: Tensor, topology: Topology | None
) -> Communication[Tensor]:
    """Returns the same as `all_gather`; only the first rank of each host takes part in its rounds.

    That rank first collects the rows of its host and finally sends all rows to its host. So ranks of a host finish
    together: no message of these rounds queues behind samples that a rank of the same host already sends.
    """
    hosts = topology.by_host(ranks) if topology else None
    size = data.numel() * data.element_size()
    if hosts is None or not size:
        return (yield from all_gather(rank, ranks, data))
    first, *others = next(host for host in hosts if rank in host)
    row = data.contiguous().view(-1).view(torch.uint8)
    rows = row.new_empty(len(ranks), size)
    if rank != first:
        yield _send([first], row)
        yield _receive(first, rows)
    else:
        own = row.new_empty(1 + len(others), size)
        own[0] = row
        receive = {r: (i * size, (i + 1) * size) for i, r in enumerate(others)}
        yield SendReceive(0, lambda out: None, {}, own[1:].view(-1), receive)
        rows = (yield from all_gather(rank, [host[0] for host in hosts], own)).view(len(ranks), size)
        yield _send(others, rows)
    return rows.view(-1).view(data.dtype).view(len(ranks), *data.shape)


def all_gather_bytes(rank: int, ranks: Sequence[int], data: bytes) -> Communication[list[bytes]]:
    """Returns the bytes of all ranks, which may differ in length."""
    longest = yield from all_reduce(rank, ranks, torch.tensor([len(data)]), torch.maximum)
    row = bytearray(len(data).to_bytes(8, "little") + data.ljust(int(longest)))
    rows = yield from all_gather(rank, ranks, torch.frombuffer(row, dtype=torch.uint8))
    texts = [bytes(r) for r in rows.numpy()]
    return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]


def broadcast_bytes(rank: int, ranks: Sequence[int], data: bytes) -> Communication[bytes]:
    """Returns the `data` of the first of `ranks`, and ignores that of the others."""
    data = data if rank == ranks[0] else b""
    size = int((yield from all_reduce(rank, ranks, torch.tensor([len(data)]), torch.maximum)))
    if not size:
        return b""
    row = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    return bytes((yield from all_reduce(rank, ranks, row, torch.maximum)).numpy())


def all_reduce(
    rank: int, ranks: Sequence[int], data: Tensor, op: Callable[[Tensor, Tensor], Tensor]
) -> Communication[Tensor]:
    """Returns the reduction of all ranks' `data`, with the same bits on every rank.

    Up a binomial tree to the first of `ranks`, and down again. `op` need not be commutative: the order is that of
    `ranks`.
    """
    parent, children = _tree(rank, ranks)
    total = data.clone()
    for child in children:
        part = torch.empty_like(total)
        yield _receive(child, part)
        total = op(total, part)
    if parent is not None:
        yield _send([parent], total)
        yield _receive(parent, total)
    if children:
        yield _send(children, total)
    return total


def all_reduce_bytes(
    rank: int, ranks: Sequence[int], data: bytes, op: Callable[[bytes, bytes], bytes]
) -> Communication[bytes]:
    """Returns the reduction of all ranks' bytes, of any length, along the same tree."""
    parent, children = _tree(rank, ranks)
    for child in children:
        data = op(data, (yield from _receive_bytes(child)))
    if parent is not None:
        yield from _send_bytes([parent], data)
        data = yield from _receive_bytes(parent)
    if children:
        yield from _send_bytes(children, data)
    return data


def barrier(rank: int, ranks: Sequence[int]) -> Communication[None]:
    """Returns once all ranks have reached it."""
    yield from all_gather(rank, ranks, torch.zeros(1, dtype=torch.uint8))


def _tree(rank: int, ranks: Sequence[int]) -> tuple[int | None, list[int]]:
    """Returns the parent and the children, nearest first, of a rank in a binomial tree. The first rank is its root."""
    n, place = len(ranks), ranks.index(rank)
    # Place p has the children p + 1, p + 2, p + 4, … below its lowest set bit; without that bit it is its parent.
    width = place & -place or 1 << (n - 1).bit_length()
    children = [ranks[place + (1 << k)] for k in range(width.bit_length() - 1) if place + (1 << k) < n]
    return ranks[place - width] if place else None, children


def _send(peers: Sequence[int], data: Tensor) -> SendReceive:
    content = data.contiguous().view(-1).view(torch.uint8)
    send = dict.fromkeys(peers, (0, len(content)))
    return SendReceive(len(content), lambda out: out.copy_(content), send, content[:0], {})


def _receive(peer: int, into: Tensor) -> SendReceive:
    out = into.view(-1).view(torch.uint8)
    return SendReceive(0, lambda out: None, {}, out, {peer: (0, len(out))})


def _send_bytes(peers: Sequence[int], data: bytes) -> Communication[None]:
    yield _send(peers, torch.tensor([len(data)]))
    if data:
        yield _send(peers, torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _receive_bytes(peer: int) -> Communication[bytes]:
    size = torch.empty(1, dtype=torch.int64)
    yield _receive(peer, size)
    data = torch.empty(int(size), dtype=torch.uint8)
    if len(data):
        yield _receive(peer, data)
    return bytes(data.numpy())
