"""A file of JSON lines, each of a step, that one worker appends to and that never outgrows its limit."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from distflow.util.files import replacing

logger = logging.getLogger(__name__)


class BoundedLog:
    """At its limit the file drops every other step, and from then on takes only every second, fourth, … one.

    Which steps are kept depends on nothing but the step, so the files of all workers keep the same ones. `step_of`
    reads the step of a line. What cannot be written is given up with a warning: a run does not end for its log.
    """

    def __init__(self, path: Path, limit: int, step_of: Callable[[bytes], int | None]) -> None:
        self.path, self.limit, self.step_of = path, limit, step_of
        self.stride = 1
        self._size = 0
        self._file: IO[bytes] | None = None

    def open(self, first: int) -> None:
        """Opens the file. Lines of steps after `first`, from where a run is continued, are removed; 0: all lines."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite(lambda step: first > 0 and step <= first)
        except OSError as e:
            self._give_up(e)

    def keeps(self, step: int) -> bool:
        """Returns whether lines of this step are written."""
        return self._file is not None and step % self.stride == 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes lines in one piece, each of which ends with a newline."""
        data = b"".join(lines)
        if self._file is None or not data:
            return
        try:
            self._file.write(data)
            self._size += len(data)
            while self._size > self.limit and self.stride < 1 << 20:
                self.stride *= 2
                self._rewrite(lambda step: step % self.stride == 0)
        except OSError as e:
            self._give_up(e)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _rewrite(self, keep: Callable[[int], bool]) -> None:
        """Replaces the file by one with only some of its lines, and opens it to append."""
        self.close()
        if self.path.exists():
            with open(self.path, "rb") as old, replacing(self.path) as new:
                new.writelines(line for line in old if (step := self.step_of(line)) is not None and keep(step))
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._size = os.fstat(self._file.fileno()).st_size

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning("%s: cannot be written (%s); nothing more is recorded there", self.path, error.strerror or error)
