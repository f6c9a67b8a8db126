"""The request to end a run: signals note it, and loops and waits act on it.

A handler that raised would be lost wherever an `except Exception` is on the way, as in `logging`; one that logged, or
set an event, could wait for a lock that the interrupted code holds.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_POLL_S = 0.05


class StopRequest:
    """The first signal lets workers finish their step; Ctrl-C after it, or `end`, ends them at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self.reason = ""  # why the run must end without such a request

    def end(self, reason: str) -> None:
        """Ends the run at once; any thread may call it."""
        self.reason, self.at_once = reason, True

    def is_requested(self) -> bool:
        return self.signal is not None or self.at_once

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Notes signals meanwhile; in another thread than the main one, where none arrives, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup: the run shall outlive its terminal
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def sleep(self, seconds: float) -> None:
        """Sleeps, but no longer than until a request."""
        end = time.monotonic() + seconds
        while not self.is_requested() and (left := end - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left))

    def _note(self, number: int, _: object) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT:
            self.at_once = True
