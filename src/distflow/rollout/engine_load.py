"""Measures how busy a rollout engine was: how many responses were unfinished, over time."""

import time

MAX_POINTS = 24


class EngineLoad:
    """Keeps the number of unfinished responses whenever it changes."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._points: list[tuple[int, int]] = []

    def add(self, left: int) -> None:
        if not self._points or left != self._points[-1][1]:
            self._points.append((round((time.perf_counter() - self._start) * 1e6), left))

    def points(self) -> list[tuple[int, int]]:
        """Returns (microseconds since the start, unfinished responses): the first, the last, and some in between."""
        every = -(-len(self._points) // MAX_POINTS) or 1
        return self._points[::-every][::-1]
