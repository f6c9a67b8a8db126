"""Data files: JSON Lines and Parquet with anything wrong in them, read row by row into columns."""

import datetime
import json
import os
import shutil
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distflow.batch.batch import as_column
from distflow.config.schema import ModelConfig
from distflow.dataset.dataset import Dataset
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView
from distflow.model.prompt_check import check_prompts
from distflow.model.source import open_model
from distflow.model.text import Text
from fuzz.harness import Case
from fuzz.junk import TEXTS, damaged, junk

LINES = (
    b"", b" ", b"\t", b"[1]", b"3", b"null", b'"x"', b"{", b"{}", b"NaN", b'{"prompt": NaN, "answer": Infinity}',
    b'{"prompt": "\\ud800", "answer": 1}', b'{"prompt": 1, "prompt": 2, "answer": 3}', b'{"prompt": "a"}',
    b'{"prompt": ' + b"9" * 5000 + b', "answer": 1}', b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b', "answer": 1}',
    b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b', "answer": 1}', b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "\xff", "answer": 1}', b'{"prompt": "\x00", "answer": 1}',
    b"\x00" * 20, b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a", "answer": 1e999}', b"// a comment",
    b"{'prompt': 'a'}", b'{"prompt": "a", "answer": 1},', b'{"prompt": [], "answer": []}',
    b'{"prompt": [{"role": "user", "content": "x"}], "answer": {"a": [1, {"b": null}]}}',
    b'{"prompt": [{"role": 3, "content": {}}], "answer": 1}', b'{"": 1, "prompt": "", "answer": ""}',
)  # fmt: skip
DAY = datetime.date(2025, 1, 1)
COLUMNS: tuple[tuple[Any, Any], ...] = (
    (pa.string(), "a"), (pa.large_string(), "b"), (pa.int64(), 1), (pa.uint64(), 2**64 - 1), (pa.float16(), 1.0),
    (pa.float64(), float("nan")), (pa.bool_(), True), (pa.null(), None), (pa.binary(), b"\xff"), (pa.binary(2), b"ab"),
    (pa.date32(), DAY), (pa.timestamp("ns"), 1), (pa.timestamp("us", "Mars/North"), 1), (pa.timestamp("s"), 2**60),
    (pa.duration("ns"), 1), (pa.time64("ns"), 1), (pa.decimal128(9, 2), Decimal("1.25")), (pa.date64(), 2**50),
    (pa.list_(pa.int32()), [1, 2]), (pa.list_(pa.list_(pa.string())), [["x"], []]), (pa.list_(pa.int8(), 2), [1, 2]),
    (pa.struct([("a", pa.int32()), ("b", pa.string())]), {"a": 1, "b": None}),
    (pa.map_(pa.string(), pa.int32()), [("k", 1)]), (pa.dictionary(pa.int32(), pa.string()), "x"),
    (pa.list_(pa.struct([("content", pa.string())])), [{"content": "hi"}]),
    (pa.struct([("d", pa.dictionary(pa.int8(), pa.string()))]), {"d": "x"}), (pa.list_(pa.timestamp("ns")), [1]),
)  # fmt: skip


class DataRows:
    name, quick, full = "rows", 200, 3000

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        (folder / "data").mkdir()
        small = ModelConfig(arch="qwen2", hidden=32, layers=1, heads=2)
        self.text = Text(open_model(small, lambda: iter(()), folder, 0), 4000)

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        folder = self.folder / "data"
        shutil.rmtree(folder)
        folder.mkdir()
        written = [self._file(folder, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        content = "; ".join(text for _, text in written)
        files: list[Any] = [path for path, _ in written]
        if rng.random() < 0.05:
            files = rng.choice(
                ([], [folder], [folder / "*.jsonl"], [folder / "none.jsonl"], [folder / rng.choice(TEXTS)])
            )
        skip, fields = rng.random() < 0.5, rng.choice((None, None, ["prompt"], ["prompt", "answer"], ["none"]))
        tokens = rng.random() < 0.3

        def run() -> None:
            dataset = Dataset(files, fields, "skip" if skip else "error", self.cache)
            view = DatasetView(dataset, {"answer": "truth"})
            if tokens:
                view = check_prompts(view, self.text, skip, 0, 1).rows
            for i in range(min(len(view), 20)):
                assert view.location(i)
                view[i]
            ids, columns = Loader(view, 4, 2, number).load(number, 0, 1)
            for name, column in columns.items():
                as_column(column, len(ids), f"data column '{name}'")

        return Case(f"{files} {fields} skip={skip}: {content}", run, (str(folder), "data column '", "no data files"))

    def _file(self, folder: Path, rng: Random) -> tuple[Path, str]:
        number = len(list(folder.iterdir()))
        pick = rng.random()
        path = folder / f"{number}.jsonl"
        if pick < 0.05:
            return self._odd(path, rng), "odd"
        if pick < 0.55:
            lines = [self._line(rng) for _ in range(rng.randrange(1, 8))]
            data = rng.choice((b"\n", b"\n", b"\r\n", b"\r", b"\n\n")).join(lines)
            if rng.random() < 0.3:
                data = damaged(data, rng)
            path.write_bytes(data)
            return path, f"{data[:300]!r}"
        path = folder / f"{number}.parquet"
        kinds = [rng.choice(COLUMNS) for _ in range(rng.randrange(5))]
        names = rng.sample(("prompt", "answer", "x", "", "prompt" if rng.random() < 0.3 else "y"), len(kinds))
        size = rng.choice((1, 1, 3, 0))
        columns = [pa.array([None if rng.random() < 0.1 else value] * size, kind) for kind, value in kinds]
        try:
            pq.write_table(pa.Table.from_arrays(columns, names), path, row_group_size=2)
        except (pa.ArrowException, ValueError, OverflowError):
            path.write_bytes(b"PAR1")
        content = f"{list(zip(names, (str(k) for k, _ in kinds), strict=True))} × {size}"
        if rng.random() < 0.5:
            path.write_bytes(damaged(path.read_bytes(), rng))
            content += " damaged"
        return path, content

    def _line(self, rng: Random) -> bytes:
        pick = rng.random()
        if pick < 0.5:
            return json.dumps({"prompt": f"what is {rng.random()}?", "answer": rng.randrange(9)}).encode()
        if pick < 0.75:
            return rng.choice(LINES)
        try:
            return json.dumps({"prompt": junk(rng), "answer": junk(rng)}, default=str, ensure_ascii=False).encode(
                errors="surrogatepass"
            )
        except (TypeError, ValueError):  # keys or numbers that JSON does not have
            return b'{"prompt": "a", "answer": 2}'

    def _odd(self, path: Path, rng: Random) -> Path:
        match rng.randrange(6):
            case 0:
                path.mkdir()
            case 1:
                os.mkfifo(path)
            case 2:
                path.symlink_to(path.parent / "gone")
            case 3:
                path.symlink_to("/dev/zero")
            case 4:
                path.write_bytes(b"")
            case _:
                path = path.with_suffix(".csv")
                path.write_text("a,b\n")
        return path
