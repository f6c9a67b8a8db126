"""Passes values between the two threads of a worker, which have a stream each on its device."""

from collections.abc import Hashable
from threading import Condition
from typing import Any

import torch

from distflow.comm.streams import CPU, Moment


class Mailbox:
    """Values by key. Each is put once and taken once, by a thread that may have to wait for it.

    On the `device` the reader's stream waits for what the writer's has begun, such as to compute the value.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._values: dict[Hashable, tuple[Any, Moment]] = {}
        self._changed = Condition()
        self._error: BaseException | None = None

    def put(self, key: Hashable, value: Any = None) -> None:
        moment = Moment(self._device)
        with self._changed:
            assert key not in self._values, key
            self._values[key] = value, moment
            self._changed.notify_all()

    def take(self, key: Hashable) -> Any:
        """Returns a value once it is there. Raises the error of the other thread if that has failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._error)
            if key not in self._values:
                assert self._error is not None
                raise self._error
            value, moment = self._values.pop(key)
        moment.wait()
        return value

    def has(self, key: Hashable) -> bool:
        """Returns whether a value is there already."""
        with self._changed:
            return key in self._values

    def fail(self, error: BaseException) -> None:
        """Raises this error in every thread that waits for a missing value."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
