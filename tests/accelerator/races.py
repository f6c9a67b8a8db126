"""Finds races on the rehearsal's device: uses of the same memory in two streams that no event orders.

A device does what a stream is asked for later than it is asked, and streams do not wait for each other. Here all is
done at once, so every use of memory is noted with the stream and its place in it, and each stream has a clock: what of
the others is over before it goes on. Events carry clocks. A host that waits has one, too. Three things may be wrong: a
stream uses memory while another one may still write to it; memory is freed, and given to the next one who allocates,
while another stream may still use it; the host changes memory that a copy has yet to read. What the host reads too
early has no value yet: a copy to host memory happens when the host waits for it.
"""

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Clock = dict[int, int]  # stream → how many of its operations are over

_lock = threading.RLock()
_ids = count()
host, begun = Clock(), Clock()  # what the host has waited for; what all streams were asked for
_found: list[str] = []
_blocks: dict[int, "Block"] = {}  # memory of the device, by address
_pinned: set[int] = set()  # addresses of host memory that the device reads and writes by itself


class RaceError(AssertionError):
    """What a device might have done in another order."""


def check() -> None:
    """Raises what was found since the last call."""
    with _lock:
        told, _found[:] = list(_found), []
    if told:
        raise RaceError("\n".join(told[:3]))


def forget() -> None:
    """Forgets what was found, copies that nobody has waited for, and that anything may still be going on."""
    gc.collect()
    with _lock:
        _join(host, begun)
        _found.clear()
        _copies.clear()


def _tell(message: str) -> None:
    stack = [f for f in traceback.extract_stack() if f"{os.sep}distflow{os.sep}" in f.filename][-3:]
    where = " < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in reversed(stack))
    _found.append(f"{message}, in {threading.current_thread().name}: {where}")


class Stream:
    """A queue of the device. Its operations follow each other, and what the host has waited for."""

    def __init__(self, name: str = "") -> None:
        self.id, self.clock = next(_ids), Clock()
        self.name = name or f"stream {self.id}"
        self.left: dict[int, _Use] = {}  # by other streams: the last of memory that it allocated and that was freed

    def join(self, clock: Clock) -> None:
        """Lets what comes from now on follow all that a clock knows."""
        with _lock:
            _join(self.clock, clock)

    def now(self) -> Clock:
        with _lock:
            return dict(self.clock)


@dataclass(frozen=True)
class _Use:
    low: int  # bytes from, to
    high: int
    stream: Stream
    place: int  # in the stream
    writes: bool
    what: str

    def over(self, clock: Clock) -> bool:
        return clock.get(self.stream.id, 0) >= self.place


@dataclass
class Block:
    """Memory of the device, which a stream has allocated: it may be memory that this stream has used before."""

    stream: Stream
    size: int
    uses: list[_Use] = field(default_factory=list)
    tensors: int = 0  # that were made of it
    held: bool = True  # and not released, with tensors that remain

    def begin(self, what: str) -> None:
        """Notes an allocation."""
        place = self.stream.clock.get(self.stream.id, 0)
        left = [u for u in self.stream.left.values() if not u.over(self.stream.clock) and not u.over(host)]
        self.stream.left = {u.stream.id: u for u in left}
        self.uses = [_Use(0, self.size, self.stream, place, True, what), *(replace(u, high=self.size) for u in left)]

    def end(self) -> None:
        """Gives the memory back to the stream that has allocated it, whatever others may still do with it."""
        for use in self.uses:
            if use.stream is not self.stream and not use.over(self.stream.clock) and not use.over(host):
                before = self.stream.left.get(use.stream.id)
                if before is None or before.place < use.place:
                    what = f"{use.what.partition(', of')[0]}, of memory that was freed,"
                    self.stream.left[use.stream.id] = replace(use, low=0, what=what)


class Held:
    """Bytes of the device that are allocated now, and the most that were since someone asked to count anew."""

    now = most = 0

    @classmethod
    def add(cls, size: int) -> None:
        cls.now += size
        cls.most = max(cls.most, cls.now)

    @classmethod
    def count_anew(cls, *_: object) -> None:
        cls.most = cls.now


def _join(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        clock[stream] = max(place, clock.get(stream, 0))


def allocated(tensor: Tensor, stream: Stream) -> Tensor:
    """Notes memory that a stream has allocated; returns the same tensor, of memory that says when it is gone."""
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if size == 0:
        return tensor
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    with _lock:
        block = _blocks.get(address)
        if block is None:
            block = _blocks[address] = Block(stream, size)
            block.begin("its allocation")
            Held.add(size)
        block.tensors += 1
    weakref.finalize(memory, _freed, block, address).atexit = False
    whole = torch.from_numpy(memory).view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _freed(block: Block, address: int) -> None:
    with _lock:
        block.tensors -= 1
        if block.tensors == 0:
            _blocks.pop(address, None)
            block.end()
            Held.add(-block.size if block.held else 0)


def emptied(tensor: Tensor) -> None:
    """Notes that a tensor remains, but not its memory."""
    with _lock:
        if block := _blocks.get(tensor.untyped_storage().data_ptr()):
            block.end()
            block.begin("its release")
            Held.add(-block.size if block.held else 0)
            block.held = False


def filled(tensor: Tensor) -> None:
    """Notes that a tensor has memory again."""
    with _lock:
        if (block := _blocks.get(tensor.untyped_storage().data_ptr())) and not block.held:
            Held.add(block.size)
            block.held = True


def launch(stream: Stream, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Notes an operation of a stream."""
    with _lock:
        stream.join(host)
        place = stream.clock[stream.id] = begun[stream.id] = stream.clock.get(stream.id, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                _use(tensor, stream, place, is_write, what)


def _use(tensor: Tensor, stream: Stream, place: int, is_write: bool, what: str) -> None:
    block = _blocks.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
    if block is None:
        return
    low = int(tensor.storage_offset()) * tensor.element_size()
    last = sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    high = low + (last + 1) * tensor.element_size()
    for use in block.uses:
        apart = use.high <= low or high <= use.low
        if (use.writes or is_write) and not apart and not use.over(stream.clock):
            _tell(
                f"a race: {what} of {list(tensor.shape)} in {stream.name}, which {use.what} in {use.stream.name} may"
                f" still {'write' if use.writes else 'read'}"
            )
            break
    # Of uses that are over for this one, later ones need not know.
    block.uses = [u for u in block.uses if not (low <= u.low and u.high <= high and (is_write or u.stream is stream))]
    block.uses.append(_Use(low, high, stream, place, is_write, what))


@dataclass(frozen=True)
class _Copy:
    """A copy that the device makes without the host."""

    stream: Stream
    place: int
    complete: Callable[[], None]
    target: Tensor  # what it writes

    def over(self, clock: Clock) -> bool:
        return clock.get(self.stream.id, 0) >= self.place


_copies: list[_Copy] = []


def empty_pinned(like: Tensor) -> Tensor:
    """Returns host memory that the device reads and writes by itself."""
    memory = np.empty(like.numel() * like.element_size() or 1, np.uint8)
    weakref.finalize(memory, _pinned.discard, memory.ctypes.data)
    _pinned.add(memory.ctypes.data)
    return torch.from_numpy(memory)[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def from_host(source: Tensor, stream: Stream) -> None:
    """Notes a copy of pinned memory that a stream was asked for: until it is over, the host leaves the memory alone."""
    before = source.clone()

    def complete() -> None:
        if not torch.equal(before.view(torch.uint8), source.contiguous().view(torch.uint8)):
            _tell(f"host memory of {list(source.shape)} was changed before its copy to the device was over")

    with _lock:
        _copies.append(_Copy(stream, stream.clock[stream.id], complete, torch.empty(0)))


def to_host(source: Tensor, target: Tensor, stream: Stream) -> None:
    """Copies `source`, the CPU's view of memory of the device, once the host waits for it."""
    value = source.clone()
    target.fill_(torch.nan if target.is_floating_point() else 1)
    with _lock:
        _copies.append(_Copy(stream, stream.clock[stream.id], partial(_fill, target, value), target))


def _fill(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def read_by_device(source: Tensor, stream: Stream) -> None:
    """Completes copies to host memory that a stream reads again."""
    with _lock:
        for copy in list(_copies):
            if copy.target.numel() and copy.target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                if not copy.over(stream.clock):
                    _tell(f"a race: {stream.name} reads host memory to which {copy.stream.name} may still copy")
                _copies.remove(copy)
                copy.complete()


def host_waits(clock: Clock) -> None:
    """Notes that all is over which a clock knows."""
    with _lock:
        _join(host, clock)
        for copy in [c for c in _copies if c.over(host)]:
            _copies.remove(copy)
            copy.complete()
