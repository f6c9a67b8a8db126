"""The order of what the threads of a worker do on its device, which has a current stream for each thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CPU = torch.device("cpu")
_WITHOUT = ("cpu", "meta")  # types of devices that have no streams
_LANES = 2  # one packs or unpacks while the other one's bytes travel


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Lets this thread use the device in a stream of its own; a new thread has the first device and its main stream.

    In one stream with another thread each would wait for what the other has begun. If one of them waits there for
    other ranks, and their threads began things in another order, all would hang.
    """
    if device.type == "cpu":
        yield
        return
    module: Any = torch.get_device_module(device)
    module.set_device(device)
    with module.stream(module.Stream()):
        yield


class Moment:
    """The work that this thread has begun on a device so far; another thread lets its stream wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None if device.type == "cpu" else torch.get_device_module(device).Event()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Lets what this thread does on the device from now on begin after that; the thread itself goes on."""
        if self._event is not None:
            self._event.wait()


class Lanes:
    """Streams of a device that take turns, so that what one does need not wait for what another does. CPUs have one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: list[Any] = [None]
        if device.type not in _WITHOUT:
            self._streams = [torch.get_device_module(device).Stream() for _ in range(_LANES)]
        self._ends: list[Moment | None] = [None] * len(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def use(self, lane: int) -> Iterator[None]:
        """Lets this thread use the stream of a lane, which waits for what the thread has begun in its own."""
        if self._streams[lane] is None:
            yield
            return
        begun = Moment(self.device)
        with torch.get_device_module(self.device).stream(self._streams[lane]):
            begun.wait()
            yield
            self._ends[lane] = Moment(self.device)

    def await_last(self, lane: int) -> None:
        """Lets this thread's stream wait for all that a lane has done: memory that it has used can be used again."""
        if end := self._ends[lane]:
            end.wait()


def finish(device: torch.device) -> None:
    """Returns when the device has done what this thread has begun there."""
    if device.type != "cpu":
        current_stream(device).synchronize()


def current_stream(device: torch.device) -> Any:
    """Returns the stream that this thread uses, hashable; None on a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream()
