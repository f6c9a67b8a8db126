"""Random access to the rows of JSON Lines and Parquet files. A worker reads the rows it asks for and nothing else.

What it takes to find a row is built once per host and shared through the page cache (cache.py).
"""

import glob
import json
import os
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distflow.data.balance import Ints
from distflow.data.dataset_cache import Build, HostCache, T, mapped_ints
from distflow.errors import DataError, cut, suggest

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")

_CHUNK = 1 << 24  # bytes of a JSON Lines file scanned at once
_BATCH = 1024  # Parquet rows held at once
_SHOWN = 20  # skipped rows described
_SPACE = b" \t\r\n"  # what JSON takes for white space


class Dataset:
    """The rows of all files, in the order given; each has the `fields` asked for, or those of the very first row.

    A file may be a pattern or a directory. With `on_bad_row="skip"` unusable rows are left out, see `skipped`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        fields: Sequence[str] | None = None,
        on_bad_row: Literal["error", "skip"] = "error",
        cache: Path | None = None,
    ) -> None:
        paths = _find([files] if isinstance(files, str | Path) else files)
        host_cache = HostCache(cache)
        skip = on_bad_row == "skip"
        self.names = tuple(fields or ())
        self._files: list[_File] = []
        for path in paths:
            parquet = path.suffix.lower() == ".parquet"
            self._files.append(_Table(path, host_cache, self.names) if parquet else _Lines(path, host_cache))
            self.names = self.names or self._files[-1].first_names(skip)
        for file in self._files if skip else ():
            file.screen(self.names)
        self._ends = list(accumulate(file.count - len(file.bad) for file in self._files))
        self.skipped_count = sum(len(file.bad) for file in self._files)
        bad = [(file, int(i)) for file in self._files for i in file.bad[:_SHOWN]]
        self.skipped = [f"{file.place(i)}: {file.pick(i, self.names)}" for file, i in bad[:_SHOWN]]
        if not len(self):
            why = f"; all {self.skipped_count} were skipped, the first is {self.skipped[0]}" if bad else ""
            raise DataError(f"{paths[0]}{', …' * (len(paths) > 1)}: no rows; give files with at least one row{why}")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        file, k = self._locate(i)
        row = file.pick(k, self.names)
        if isinstance(row, str):
            raise file.error(k, row)
        return row

    def describe(self, i: int) -> str:
        """Where row `i` is: `file:line`, or `file:row` of a Parquet file, counted from 1."""
        file, k = self._locate(i)
        return file.place(k)

    def _locate(self, i: int) -> tuple["_File", int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = bisect_right(self._ends, i)
        return self._files[k], self._files[k].nth_good(i - (self._ends[k - 1] if k else 0))


class _File(ABC):
    """The rows of one file. `bad` are those left out, ascending."""

    count: int

    def __init__(self, path: Path, cache: HostCache, stat: os.stat_result) -> None:
        self.path, self.cache = path, cache
        self.stamp = (stat.st_size, stat.st_mtime_ns)
        self.bad: Ints = np.empty(0, np.int64)

    @abstractmethod
    def read(self, i: int) -> dict[str, Any] | str:
        """The row, or why it cannot be used."""

    def place(self, i: int) -> str:
        return f"{self.path}:{i + 1}"

    def pick(self, i: int, names: tuple[str, ...]) -> dict[str, Any] | str:
        """The row with these fields, or why it cannot be used."""
        row = self.read(i)
        if isinstance(row, str):
            return row
        for name in names:
            if name not in row:
                shown = _excerpt(json.dumps(row, ensure_ascii=False, default=str))
                return f"{shown} has no field '{name}'{suggest(name, row)}"
        return {name: row[name] for name in names}

    def error(self, i: int, why: str) -> DataError:
        return DataError(f"{self.place(i)}: {why} – mend the row or set `data.on_bad_row: skip`")

    def first_names(self, skip: bool) -> tuple[str, ...]:
        for i in range(self.count):
            row = self.read(i)
            if not isinstance(row, str):
                return tuple(row)
            if not skip:
                raise self.error(i, row)
        return ()

    def screen(self, names: tuple[str, ...]) -> None:
        """Find the bad rows. Reads every row, once per host."""

        def build(out: BinaryIO) -> None:
            bad = [i for i in range(self.count) if isinstance(self.pick(i, names), str)]
            out.write(np.array([*bad, self.count], np.int64).tobytes())

        self.bad = self.cached("bad", names, build, lambda entry: mapped_ints(entry, self.count))[:-1]
        self._good_before = self.bad - np.arange(len(self.bad))  # how many good rows come before each bad one

    def nth_good(self, i: int) -> int:
        return i + int(np.searchsorted(self._good_before, i, side="right")) if len(self.bad) else i

    def cached(self, kind: str, names: tuple[str, ...], build: Build, read: Callable[[Path], T]) -> T:
        """What `build` makes of this very state of the file."""
        return self.cache.get(self.path, [*self.stamp, *names], kind, build, read)


class _Lines(_File):
    """JSON Lines: `index` has (line number, offset) of every row that is not blank, and of the end of the file."""

    def __init__(self, path: Path, cache: HostCache) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise DataError(f"{path}: cannot be read: {e.strerror}; check its permissions and `ulimit -n`") from e
        weakref.finalize(self, os.close, self.fd)
        super().__init__(path, cache, os.fstat(self.fd))
        self.index = self.cached("lines", (), self._scan, lambda entry: mapped_ints(entry, self.stamp[0])).reshape(
            -1, 2
        )
        self.count = len(self.index) - 1

    def place(self, i: int) -> str:
        return f"{self.path}:{self.index[i, 0]}"

    def read(self, i: int) -> dict[str, Any] | str:
        start, end = self.index[i : i + 2, 1].tolist()
        try:
            raw = os.pread(self.fd, end - start, start).rstrip(_SPACE)
        except OSError as e:
            raise DataError(f"{self.path}: cannot be read any more: {e}; is it still there, and its disk?") from e
        try:
            row = json.loads(raw.decode())
            if isinstance(row, dict):
                return row
            reason = f"it is a {type(row).__name__}"
        except json.JSONDecodeError as e:
            reason = f"{e.msg} at column {e.colno}"
        except (ValueError, RecursionError) as e:
            reason = str(e)
        self._check_unchanged()
        return f"{_excerpt(raw[:400].decode(errors='replace'))} is not a JSON object on one line ({reason})"

    def _check_unchanged(self) -> None:
        stat = os.fstat(self.fd)
        if (stat.st_size, stat.st_mtime_ns) != self.stamp:
            raise DataError(f"{self.path}: the file changed while it was in use; leave it as it is and start again")

    def _scan(self, out: BinaryIO) -> None:
        size, line = self.stamp[0], 1
        at = 3 if os.pread(self.fd, 3, 0) == b"\xef\xbb\xbf" else 0  # a byte order mark is not part of the first row
        rest = b""  # the beginning of a line whose end is in the next chunk
        while at < size:
            more = os.pread(self.fd, min(_CHUNK, size - at - len(rest)), at + len(rest))
            if not more:
                self._check_unchanged()
            text = rest + more
            done = len(text) if at + len(text) >= size else text.rfind(b"\n") + 1
            data = np.frombuffer(text, np.uint8, done)
            starts = np.concatenate(([0], np.flatnonzero(data == ord("\n")) + 1))
            starts = starts[starts < done]
            solid = ~np.isin(data[starts], list(_SPACE))
            for k in np.flatnonzero(~solid):  # rare: a line that is blank or indented
                solid[k] = bool(text[starts[k] : starts[k + 1] if k + 1 < len(starts) else done].strip(_SPACE))
            rows = np.flatnonzero(solid)
            out.write(np.stack((line + rows, at + starts[rows]), axis=1).tobytes())
            at, line, rest = at + done, line + len(starts), text[done:]
        out.write(np.array([line, size], np.int64).tobytes())


class _Table(_File):
    """Parquet, unpacked into an Arrow file that is mapped: only the pages of the rows read are ever in memory."""

    def __init__(self, path: Path, cache: HostCache, names: tuple[str, ...]) -> None:
        super().__init__(path, cache, path.stat())
        self.asked = names
        # All record batches of the mapped file as one table: nothing is copied, Arrow finds the batch of a row.
        self.table = self.cached(
            "arrow", names, self._unpack, lambda entry: pa.ipc.open_file(pa.memory_map(str(entry))).read_all()
        )
        self.count = int(self.table.num_rows)

    def read(self, i: int) -> dict[str, Any] | str:
        try:
            return {name: self.table[name][i].as_py() for name in self.table.column_names}
        except (ValueError, ArithmeticError, LookupError) as e:  # a date that Python has not, an unknown time zone
            return f"the row cannot be read ({e})"

    def _unpack(self, out: BinaryIO) -> None:
        try:
            with pq.ParquetFile(self.path, pre_buffer=False) as source:  # pre-buffering would hold whole row groups
                schema = self._schema(source.schema_arrow)
                with pa.ipc.new_file(out, schema) as writer:
                    for batch in source.iter_batches(_BATCH, columns=schema.names):
                        writer.write_table(pa.Table.from_batches([batch]).cast(schema))
        except (pa.ArrowException, ValueError, LookupError, ArithmeticError, TypeError) as e:
            raise DataError(f"{self.path}: cannot be read as Parquet ({e}); write it again, or name it .jsonl") from e

    def _schema(self, columns: pa.Schema) -> pa.Schema:
        """The columns asked for, or all; of plain values, as Arrow files cannot have a dictionary per row group."""
        for name in self.asked:
            if name not in columns.names:
                raise DataError(f"{self.path}: has no column '{name}'{suggest(name, columns.names)}")
        for name in self.asked or columns.names:
            if columns.names.count(name) > 1:
                raise DataError(f"{self.path}: has two columns '{name}'; give one of them another name")
        asked = [c for c in columns if not self.asked or c.name in self.asked]
        return pa.schema(c.with_type(c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in asked)


def _excerpt(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"


def _unfold(path: Path) -> list[Path]:
    if path.is_dir():
        these = [p for p in path.iterdir() if p.suffix.lower() in SUFFIXES]
    else:
        these = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    these = sorted(p for p in these if not p.is_dir())
    if not these:
        near = suggest(path.name, (p.name for p in path.parent.glob("*")))
        none = f"no {', '.join(SUFFIXES)} in it" if path.is_dir() else f"no such file{near}"
        raise DataError(f"{cut(str(path.absolute()), 300)}: {none}")
    return these


def _find(files: Sequence[str | Path]) -> list[Path]:
    """Patterns and directories unfolded, in the order given; sorted within each."""
    if not files:
        raise DataError(f"no data files are given; name at least one ({', '.join(SUFFIXES)})")
    found: list[Path] = []
    for file in files:
        try:
            found += _unfold(Path(file).expanduser())
        except (OSError, ValueError, RuntimeError) as e:  # a name too long, no such user, …
            raise DataError(f"{cut(str(file), 300)}: cannot be looked up: {e}; check how it is written") from e
    for path in found:
        if not path.is_file():  # to open a pipe would wait for whoever writes to it
            raise DataError(f"{path}: is not a file that can be read more than once; copy what it gives to a file")
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: cannot read '{path.suffix}' files; convert it to one of {', '.join(SUFFIXES)}")
    return found
