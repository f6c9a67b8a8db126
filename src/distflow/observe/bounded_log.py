"""A file of JSON lines, each of a step, that one worker appends to and that never outgrows its limit."""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from distflow.util.files import replacing
from distflow.util.patient_files import WaitingLines, WriteErrors
from distflow.util.private_folder import make_private

logger = logging.getLogger(__name__)
UNLIMITED = 1 << 62


class BoundedLog:
    """At its limit the file drops every other step, and from then on takes only every second, fourth, … one.

    Which steps are kept depends on nothing but the step, so the files of all workers keep the same ones. `step_of`
    reads the step of a line. Lines that cannot be written wait in memory and are tried again with the next ones: a run
    does not end for its log. At any time the file ends with a whole line.
    """

    def __init__(self, path: Path, limit: int, step_of: Callable[[bytes], int | None]) -> None:
        self.path, self.limit, self.step_of = path, limit, step_of
        self.stride = 1
        self._errors = WriteErrors(path)
        self._waiting = WaitingLines(self._errors)
        self._is_open = False
        self._keep: Callable[[int], bool] | None = None  # the steps to which the file is yet to be reduced
        self._file: BinaryIO | None = None
        self._size = 0  # of the whole lines in the file
        self._torn = False  # there is a part of a line behind them

    def open(self, first: int) -> None:
        """Opens the file. Lines of steps after `first`, from where a run is continued, are removed; 0: all lines."""
        self._is_open, self._keep = True, lambda step: first > 0 and step <= first
        self._write()

    def keeps(self, step: int) -> bool:
        """Returns whether lines of this step are written."""
        return self._is_open and step % self.stride == 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes lines in one piece, each of which ends with a newline."""
        data = b"".join(lines)
        if data and self._is_open:
            self._waiting.add(data)
            self._write()

    def close(self) -> None:
        if self._is_open and (self._waiting or self._keep):
            self._write()
        self._is_open = False
        self._close_file()
        self._errors.close(len(self._waiting))

    def _write(self) -> None:
        """Brings the file up to date, or leaves the rest to the next call."""
        try:
            self._find_file()
            self._reduce()
            self._append_waiting()
            while self._size > self.limit and self.stride < 1 << 20:
                self.stride *= 2
                self._keep = lambda step: step % self.stride == 0
                self._reduce()
        except OSError as e:
            self._errors.failed(e)
        else:
            self._errors.succeeded()

    def _find_file(self) -> None:
        """Opens the file to append; a new one if the old one was removed."""
        if self._file and not os.fstat(self._file.fileno()).st_nlink:
            logger.warning("%s: was removed while the run writes it; the steps that it had are lost", self.path)
            self._close_file()
        if not self._file:
            make_private(self.path.parent)
            self._file = cast(BinaryIO, open(self.path, "ab", buffering=0))  # noqa: SIM115 (closed by `close`)
            self._size = os.fstat(self._file.fileno()).st_size

    def _reduce(self) -> None:
        """Removes all lines but those of the steps to keep."""
        if self._keep is None:
            return
        assert self._file
        kept, at, removed, foreign = 0, 0, False, 0  # `kept`: where the lines to keep end that nothing is removed from
        with open(self.path, "rb") as old:
            for line in old:
                at += len(line)
                if self._is_kept(line):
                    removed |= kept != at - len(line)
                    kept = kept if removed else at
                else:
                    foreign += line.endswith(b"\n") and self.step_of(line) is None
        if not removed:  # in place: also where the disk is full
            os.ftruncate(self._file.fileno(), kept)
            self._size = kept
        else:
            with open(self.path, "rb") as old, replacing(self.path) as new:
                new.writelines(line for line in old if self._is_kept(line))
            self._close_file()
            self._find_file()
        self._keep, self._torn = None, False
        if foreign:
            logger.warning("%s: %d damaged lines, which are of no step, were removed", self.path, foreign)

    def _is_kept(self, line: bytes) -> bool:
        step = self.step_of(line)
        return step is not None and self._keep is not None and self._keep(step)

    def _append_waiting(self) -> None:
        assert self._file
        if self._torn:
            os.ftruncate(self._file.fileno(), self._size)
            self._torn = False
        data, at = self._waiting.take(), 0
        try:
            while at < len(data):  # a system that takes only a part says why not with the next one
                at += self._file.write(data[at:])
        except OSError:
            self._waiting.add(data)
            self._torn = True
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._size)
                self._torn = False
            raise
        self._size += len(data)

    def _close_file(self) -> None:
        if self._file:
            with suppress(OSError):  # some file systems say only here what went wrong
                self._file.close()
            self._file = None
