"""Time limits of tests, which only keep a hang from lasting for ever: beside load they are longer, as all is."""

import os
import time
from collections.abc import Callable

_MOST = 30.0  # a test that starts a flood of processes must not take the limits of all others away


class TimeLimit:
    """Is over after `limit_s`, times the runnable processes per processor of the machine while that is above one."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.start, self.factor = limit_s, time.monotonic(), 1.0

    def left(self) -> float:
        """Returns the seconds that are left, at most so many that the load is looked at again in time."""
        self.factor = max(self.factor, load_factor())
        return min(self.start + self.limit_s * self.factor - time.monotonic(), max(self.limit_s, 1.0))

    def __str__(self) -> str:
        return f"{self.limit_s * self.factor:.0f} s"


def load_factor() -> float:
    """Returns how many processes share a processor, by the load of the last minute; at least 1 and at most 30."""
    return min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), _MOST)


def wait_until(condition: Callable[[], object], limit_s: float = 60, state: Callable[[], object] = lambda: "") -> None:
    """Returns when the condition holds; `state` describes what there is if it does not in time."""
    limit = TimeLimit(limit_s)
    while not condition():
        assert limit.left() > 0, f"still waiting after {limit}: {state()}"
        time.sleep(0.01)
