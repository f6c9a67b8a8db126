"""Reads files of JSON lines whose writer may be writing, may have been killed while it wrote, or may replace them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

StepOf = Callable[[bytes], int | None]


def log_files(folder: Path) -> list[Path]:
    """Returns the files of workers in a folder of a run, by rank; links to somewhere else are not among them."""
    if folder.is_symlink():
        return []
    files = [p for p in folder.glob("*.jsonl") if p.stem.isdecimal() and not p.is_symlink()]
    return sorted(files, key=lambda p: int(p.stem))


def parse(line: bytes) -> Any:
    """Returns a line's value, None if it is not a whole line of JSON."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


def step_row(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line that belongs to a step, None if it is not a whole one of these."""
    row = parse(line)
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def row_step(line: bytes) -> int | None:
    """Returns the step of such a line."""
    row = step_row(line)
    return None if row is None else int(row["step"])


class Tail:
    """Gives the lines of a file that were written since it was last asked, from the beginning if it was replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._at = 0

    def replaced(self) -> bool:
        """Returns whether the file is another one now: what was read before is no longer in it."""
        try:
            state = self.path.stat()
        except OSError:
            return False
        return bool(self._inode) and (state.st_ino != self._inode or state.st_size < self._at)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, line) of every whole line that is new."""
        if self.replaced():
            self._at = 0
        try:
            with open(self.path, "rb") as file:
                self._inode = self.path.stat().st_ino
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    yield self._at, line
                    self._at += len(line)
        except OSError:
            return


SLACK = 8  # steps by which neighbouring lines may be out of order: workers that run ahead end a step later


def lines_of_steps(path: Path, first: int, last: int, step_of: StepOf) -> list[bytes]:
    """Returns the lines of some steps, found by bisection: a file may be long, and there may be a thousand of them."""
    try:
        with open(path, "rb") as file:
            low, high = 0, file.seek(0, 2)
            while high - low > 4096:
                middle = (low + high) // 2
                file.seek(middle)
                file.readline()  # the rest of a line
                step = step_of(file.readline())
                if step is None or step >= first - SLACK:
                    high = middle
                else:
                    low = middle
            file.seek(low)
            if low:
                file.readline()
            found = []
            for line in file:
                step = step_of(line)
                if step is not None and step > last + SLACK:
                    break
                if step is not None and first <= step <= last:
                    found.append(line)
            return found
    except OSError:
        return []
