"""Files that a run can do without: a write that fails does not end it, is said once, and is tried again. Imports no
torch."""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from distflow.errors import cut, short_reason
from distflow.util.files import write_atomically

logger = logging.getLogger(__name__)
MAX_WAITING = 16 << 20  # bytes of lines that wait in memory until their file can be written; then the oldest are lost


class WriteErrors:
    """Warns once when writes of one file begin to fail, and says when they succeed again.

    `counts_losses`: the writer keeps what could not be written, or counts it as `lost`.
    """

    _failed: ClassVar[int] = 0  # of all files, since they were last counted
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: object, counts_losses: bool = True) -> None:
        self.name, self.counts_losses = name, counts_losses
        self.lost = 0  # lines or entries that are missing there
        self._in_a_row, self._reason = 0, ""

    @classmethod
    def take_count(cls) -> int:
        """Returns how many writes of this process have failed since the last call."""
        with cls._lock:
            count, cls._failed = cls._failed, 0
        return count

    def failed(self, error: Exception) -> None:
        with self._lock:
            WriteErrors._failed += 1
        self._in_a_row += 1
        self._reason = cut(short_reason(error), 300)
        if self._in_a_row == 1:
            logger.warning("%s: cannot be written (%s); the run goes on and tries it again", self.name, self._reason)

    def succeeded(self) -> None:
        if self._in_a_row:  # with the reason: a log on the same disk has not got the warning
            losses = self._losses() or ("; nothing is lost" if self.counts_losses else "")
            text = "%s: is written again, after %d failed writes (%s)%s"
            logger.warning(text, self.name, self._in_a_row, self._reason, losses)
        self._in_a_row = 0

    def close(self, left: int = 0) -> None:
        """Says what is lost if it still cannot be written. `left`: lines or entries that are not yet there."""
        self.lost += left
        if self._in_a_row:
            text = "%s: could not be written up to the end of the run (%s)%s"
            logger.warning(text, self.name, self._reason, self._losses())
            self._in_a_row = 0

    def _losses(self) -> str:
        if not self.lost:
            return ""
        return f"; {self.lost} entries are lost" if self.lost > 1 else "; 1 entry is lost"


class WholeFiles:
    """Files that are replaced as a whole, such as the description of a run; the newest text of each counts."""

    def __init__(self) -> None:
        self._unwritten: dict[Path, str] = {}
        self._errors: dict[Path, WriteErrors] = {}

    def write(self, path: Path, text: str) -> None:
        self._unwritten[path] = text
        self.retry()

    def retry(self) -> None:
        """Writes what could not be written before."""
        for path, text in list(self._unwritten.items()):
            errors = self._errors.setdefault(path, WriteErrors(path))
            try:
                write_atomically(path, text)
            except OSError as e:
                errors.failed(e)
            else:
                del self._unwritten[path]
                errors.succeeded()

    def close(self) -> None:
        self.retry()
        for path in self._unwritten:
            self._errors[path].close(1)


class WaitingLines:
    """Lines that are not yet in their file, oldest first; a bounded number of bytes."""

    def __init__(self, errors: WriteErrors) -> None:
        self._errors = errors
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        while self._size > MAX_WAITING and len(self._pieces) > 1:
            lost = self._pieces.popleft()
            self._size -= len(lost)
            self._errors.lost += lost.count(b"\n")

    def take(self) -> bytes:
        """Returns all of them, which wait no longer."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return data

    def __len__(self) -> int:
        return sum(piece.count(b"\n") for piece in self._pieces)


class SharedLog:
    """A log to which processes of several workers append; lines of one call stay together."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._errors = WriteErrors(path)
        self._waiting = WaitingLines(self._errors)
        self._torn = False  # the file ends with a part of a line of ours

    def append(self, lines: Iterable[str]) -> None:
        self._waiting.add("".join(line + "\n" for line in lines).encode(errors="replace"))
        data, at = b"\n" * self._torn + self._waiting.take(), 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                while at < len(data):  # usually one write: other workers append to the same file
                    at += file.write(data[at:])
                    self._torn = not data[:at].endswith(b"\n")
        except OSError as e:
            self._waiting.add(data[data.rfind(b"\n", 0, at) + 1 :] if at else data.removeprefix(b"\n"))
            self._errors.failed(e)
        else:
            self._errors.succeeded()
