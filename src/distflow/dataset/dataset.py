"""Random access to the rows of JSON Lines and Parquet files. A worker reads only its own rows.

The index of a file is built once per host and shared through the page cache (cache.py).
"""

import glob
import hashlib
import json
import os
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distflow.dataset.cache import Build, HostCache, T, mapped_ints
from distflow.errors import DataError, cut, suggest
from distflow.util.arrays import Ints

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")

_CHUNK = 1 << 24  # bytes of a JSON Lines file scanned at a time
_BLOCK = 1 << 16  # bytes of a JSON Lines file that are hashed at a time
_BATCH, _READ = 1024, 32  # Parquet rows converted at a time, and read
_EXPANSION, _SMALL = 200, 64 << 20  # limits Parquet rows to this multiple of the file size, beyond this many bytes
_MAX_LISTED = 20  # skipped rows listed
_WHITESPACE = b" \t\r\n"  # as JSON defines it


class Dataset:
    """The rows of all files, in their order. Each row has the given `fields`, or by default those of the first row.

    A file may be a pattern or a directory. With `on_bad_row="skip"` unusable rows are left out and listed in `skipped`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        fields: Sequence[str] | None = None,
        on_bad_row: Literal["error", "skip"] = "error",
        cache: Path | None = None,
    ) -> None:
        paths = resolve_files([files] if isinstance(files, str | Path) else files)
        host_cache = HostCache(cache)
        skip = on_bad_row == "skip"
        names = tuple(fields or ())
        self.files: list[_File] = []
        for path in paths:
            parquet = path.suffix.lower() == ".parquet"
            self.files.append(_ParquetFile(path, host_cache, names) if parquet else _JsonLinesFile(path, host_cache))
            names = names or self.files[-1].first_names(skip)
        self.column_names = names
        for file in self.files if skip else ():
            file.find_bad_rows(names)
        self._ends = list(accumulate(file.count - len(file.bad) for file in self.files))
        self.skipped_count = sum(len(file.bad) for file in self.files)
        bad = [(file, int(i)) for file in self.files for i in file.bad[:_MAX_LISTED]]
        self.skipped = [f"{file.location(i)}: {file.read_fields(i, names)}" for file, i in bad[:_MAX_LISTED]]
        if not len(self):
            reason = f"; all {self.skipped_count} were skipped, the first is {self.skipped[0]}" if bad else ""
            raise DataError(f"{paths[0]}{', …' * (len(paths) > 1)}: no rows; give files with at least one row{reason}")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        file, k = self._locate(i)
        row = file.read_fields(k, self.column_names)
        if isinstance(row, str):
            raise file.error(k, row)
        return row

    def first(self, count: int) -> Iterator[dict[str, Any]]:
        """Yields the first rows with all that their files have; unusable ones are left out."""
        every = (file.read(i) for file in self.files for i in range(file.count))
        yield from (row for row in islice(every, count) if not isinstance(row, str))

    def file_of(self, rows: Ints) -> Ints:
        """Returns the place of each row's file among the files."""
        return np.searchsorted(self._ends, rows, side="right")

    def location(self, i: int) -> str:
        """Returns `file:line` of row `i`, or `file:row` for a Parquet file, counted from 1."""
        file, k = self._locate(i)
        return file.location(k)

    def folder(self, i: int) -> Path:
        """Returns the folder of the file that row `i` is in."""
        return self._locate(i)[0].path.parent

    def _locate(self, i: int) -> tuple["_File", int]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        k = bisect_right(self._ends, i)
        return self.files[k], self.files[k].nth_good(i - (self._ends[k - 1] if k else 0))


class _File(ABC):
    """The rows of one file. `bad` are the rows left out, ascending."""

    count: int

    def __init__(self, path: Path, cache: HostCache, stat: os.stat_result) -> None:
        self.path, self.cache = path, cache
        self.stamp = (stat.st_size, stat.st_mtime_ns)
        self.bad: Ints = np.empty(0, np.int64)

    @abstractmethod
    def read(self, i: int) -> dict[str, Any] | str:
        """Returns the row, or the reason that it is unusable."""

    @abstractmethod
    def digest(self, count: int, blocks: int) -> str:
        """Returns a hash of the first `count` rows, of at most `blocks` blocks of them. It depends on their order."""

    def location(self, i: int) -> str:
        return f"{self.path}:{i + 1}"

    def read_fields(self, i: int, names: tuple[str, ...]) -> dict[str, Any] | str:
        """Returns the row with these fields, or the reason that it is unusable."""
        row = self.read(i)
        if isinstance(row, str):
            return row
        for name in names:
            if name not in row:
                excerpt = _excerpt(json.dumps(row, ensure_ascii=False, default=str))
                return f"{excerpt} has no field '{name}'{suggest(name, row)}"
        return {name: row[name] for name in names}

    def error(self, i: int, reason: str) -> DataError:
        return DataError(f"{self.location(i)}: {reason} – fix the row or set `data.on_bad_row: skip`")

    def first_names(self, skip: bool) -> tuple[str, ...]:
        for i in range(self.count):
            row = self.read(i)
            if not isinstance(row, str):
                return tuple(row)
            if not skip:
                raise self.error(i, row)
        return ()

    def find_bad_rows(self, names: tuple[str, ...]) -> None:
        """Sets `bad`. Reads every row, once per host."""

        def build(out: BinaryIO) -> None:
            bad = [i for i in range(self.count) if isinstance(self.read_fields(i, names), str)]
            out.write(np.array([*bad, self.count], np.int64).tobytes())

        self.bad = self.cached("bad", names, build, lambda entry: mapped_ints(entry, self.count))[:-1]
        self._good_before = self.bad - np.arange(len(self.bad))  # the number of good rows before each bad one

    def nth_good(self, i: int) -> int:
        return i + int(np.searchsorted(self._good_before, i, side="right")) if len(self.bad) else i

    def cached(self, kind: str, names: tuple[str, ...], build: Build, read: Callable[[Path], T]) -> T:
        """Returns the result of `build` for the file in its present state, from the cache if possible."""
        return self.cache.get(self.path, [*self.stamp, *names], kind, build, read)


class _JsonLinesFile(_File):
    """JSON Lines. `index` has (line number, offset) of every line that is not blank, and of the end of the file."""

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

    def location(self, i: int) -> str:
        return f"{self.path}:{self.index[i, 0]}"

    def read(self, i: int) -> dict[str, Any] | str:
        start, end = self.index[i : i + 2, 1].tolist()
        raw = self._pread(start, end).rstrip(_WHITESPACE)
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

    def digest(self, count: int, blocks: int) -> str:
        end = 0
        if count:
            start, end = self.index[count - 1 : count + 1, 1].tolist()
            end = start + len(self._pread(start, end).rstrip(_WHITESPACE))  # rows that follow begin with a new line
        digest = hashlib.sha256(str(end).encode())
        for block in _evenly(-(-end // _BLOCK), blocks):
            digest.update(self._pread(block * _BLOCK, min((block + 1) * _BLOCK, end)))
        return digest.hexdigest()[:32]

    def _pread(self, start: int, end: int) -> bytes:
        try:
            return os.pread(self.fd, end - start, start)
        except OSError as e:
            raise DataError(
                f"{self.path}: cannot be read any more: {e}; check that the file and its disk are still there"
            ) from e

    def _check_unchanged(self) -> None:
        stat = os.fstat(self.fd)
        if (stat.st_size, stat.st_mtime_ns) != self.stamp:
            raise DataError(
                f"{self.path}: the file changed while it was in use; do not change it during a run, and start again"
            )

    def _scan(self, out: BinaryIO) -> None:
        size, line = self.stamp[0], 1
        at = 3 if os.pread(self.fd, 3, 0) == b"\xef\xbb\xbf" else 0  # a byte order mark is not part of the first row
        rest = b""  # the beginning of a line that ends in the next chunk
        while at < size:
            chunk = os.pread(self.fd, min(_CHUNK, size - at - len(rest)), at + len(rest))
            if not chunk:
                self._check_unchanged()
            text = rest + chunk
            done = len(text) if at + len(text) >= size else text.rfind(b"\n") + 1
            data = np.frombuffer(text, np.uint8, done)
            starts = np.concatenate(([0], np.flatnonzero(data == ord("\n")) + 1))
            starts = starts[starts < done]
            has_text = ~np.isin(data[starts], list(_WHITESPACE))
            for k in np.flatnonzero(~has_text):  # rare: a line that is blank or indented
                has_text[k] = bool(text[starts[k] : starts[k + 1] if k + 1 < len(starts) else done].strip(_WHITESPACE))
            rows = np.flatnonzero(has_text)
            out.write(np.stack((line + rows, at + starts[rows]), axis=1).tobytes())
            at, line, rest = at + done, line + len(starts), text[done:]
        out.write(np.array([line, size], np.int64).tobytes())


class _ParquetFile(_File):
    """Parquet, converted to a memory-mapped Arrow file: only the pages of the rows that are read are in memory."""

    def __init__(self, path: Path, cache: HostCache, names: tuple[str, ...]) -> None:
        super().__init__(path, cache, path.stat())
        self.fields = names
        # All record batches of the mapped file as one table: nothing is copied, Arrow finds the batch of a row.
        self.table = self.cached(
            "arrow", names, self._convert, lambda entry: pa.ipc.open_file(pa.memory_map(str(entry))).read_all()
        )
        self.count = int(self.table.num_rows)

    def read(self, i: int) -> dict[str, Any] | str:
        try:
            return {name: self.table[name][i].as_py() for name in self.table.column_names}
        except (ValueError, ArithmeticError, LookupError) as e:  # a date out of Python's range, an unknown time zone
            return f"the row cannot be read ({e})"

    def digest(self, count: int, blocks: int) -> str:
        digest = hashlib.sha256(str(count).encode())
        for block in _evenly(-(-count // _READ), blocks):
            first, last = block * _READ, min((block + 1) * _READ, count)
            digest.update(repr([self.read(i) for i in range(first, last)]).encode(errors="surrogatepass"))
        return digest.hexdigest()[:32]

    def _convert(self, out: BinaryIO) -> None:
        try:
            with pq.ParquetFile(self.path, pre_buffer=False) as source:  # pre-buffering would hold entire row groups
                schema = self._schema(source.schema_arrow)
                with pa.ipc.new_file(out, schema) as writer:
                    rows = self._rows(source, schema)
                    while tables := list(islice(rows, max(1, _BATCH // _READ))):
                        writer.write_table(pa.concat_tables(tables).combine_chunks())
        except (pa.ArrowException, ValueError, LookupError, ArithmeticError, TypeError) as e:
            raise DataError(f"{self.path}: cannot be read as Parquet ({e}); write it again, or name it .jsonl") from e

    def _rows(self, source: pq.ParquetFile, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yields a few rows at a time. Raises if they far exceed the file, which may be made to fill a disk."""
        size, most = 0, max(_EXPANSION * self.stamp[0], _SMALL)
        for batch in source.iter_batches(min(_READ, _BATCH), columns=schema.names):
            rows = pa.Table.from_batches([batch]).cast(schema)
            size += rows.nbytes
            if size > most:
                raise DataError(
                    f"{self.path}: its {self.stamp[0] / 1e3:,.0f} kB become more than {most / 1e6:,.0f} MB of rows; if"
                    " they are meant to, write them as .jsonl"
                )
            yield rows

    def _schema(self, columns: pa.Schema) -> pa.Schema:
        """Returns the given fields, or all, decoded: an Arrow file cannot have one dictionary per row group."""
        for name in self.fields:
            if name not in columns.names:
                raise DataError(f"{self.path}: has no column '{name}'{suggest(name, columns.names)}")
        for name in self.fields or columns.names:
            if columns.names.count(name) > 1:
                raise DataError(f"{self.path}: has two columns '{name}'; rename one of them")
        chosen = [c for c in columns if not self.fields or c.name in self.fields]
        return pa.schema(c.with_type(c.type.value_type) if pa.types.is_dictionary(c.type) else c for c in chosen)


def _evenly(count: int, most: int) -> list[int]:
    """Returns at most `most` of `count` places, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist() if count else []


def _excerpt(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"


def _expand(path: Path) -> list[Path]:
    """Returns the files of a directory or pattern, sorted, or the file itself."""
    if path.is_dir():
        matches = [p for p in path.iterdir() if p.suffix.lower() in SUFFIXES]
    else:
        matches = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    matches = sorted(p for p in matches if not p.is_dir())
    if not matches:
        near = suggest(path.name, (p.name for p in path.parent.glob("*")))
        reason = f"no {', '.join(SUFFIXES)} in it" if path.is_dir() else f"no such file{near}"
        on_hub = "" if path.parent.is_dir() else "; a split of the hub is hub:OWNER/NAME/CONFIG/SPLIT"
        raise DataError(f"{cut(str(path.absolute()), 300)}: {reason}{on_hub}")
    return matches


def resolve_files(files: Sequence[str | Path]) -> list[Path]:
    """Expands directories and patterns, in their order, and checks that every file can be read."""
    if not files:
        raise DataError(f"no data files are given; name at least one ({', '.join(SUFFIXES)})")
    paths: list[Path] = []
    for file in files:
        try:
            paths += _expand(Path(file).expanduser())
        except (OSError, ValueError, RuntimeError) as e:  # a name too long, no such user, …
            raise DataError(f"{cut(str(file), 300)}: cannot be looked up: {e}; check the path") from e
    for path in paths:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise DataError(f"{path}: is not a regular file; copy its content to one")
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: cannot read '{path.suffix}' files; convert it to one of {', '.join(SUFFIXES)}")
    return paths
