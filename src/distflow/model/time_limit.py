"""A time limit for foreign Python code in this process, such as the chat template of a model."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHECK_S = 0.2  # interval at which the clock checks; starting a limit is cheap

_lock = threading.Lock()
_deadlines: dict[int, float] = {}  # by thread
_late: set[int] = set()  # threads whose exception is under way
_clock: threading.Thread | None = None


class OutOfTimeError(Exception):
    """Raised in the code that takes too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTimeError` in this thread if the block takes longer; but not inside a C function."""
    global _clock
    thread = threading.get_ident()
    with _lock:
        _deadlines[thread] = time.monotonic() + seconds
        if _clock is None or not _clock.is_alive():  # a fork has none
            _clock = threading.Thread(target=_watch, name="time limit", daemon=True)
            _clock.start()
    try:
        yield
    finally:
        with _lock:
            _deadlines.pop(thread, None)
            if thread in _late:  # it may not have been raised yet
                _late.discard(thread)
                _raise_in(thread, None)


def _watch() -> None:
    while True:
        time.sleep(_CHECK_S)
        with _lock:
            for thread in [t for t, deadline in _deadlines.items() if deadline < time.monotonic()]:
                del _deadlines[thread]
                _late.add(thread)
                _raise_in(thread, OutOfTimeError)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)
