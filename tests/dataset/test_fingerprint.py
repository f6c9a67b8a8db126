"""A resumed run knows its rows: they may become more behind the last one, and nothing else."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distflow.dataset import dataset, fingerprint
from distflow.dataset.dataset import Dataset
from distflow.dataset.fingerprint import changes
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView

Write = Callable[[Path, Sequence[int]], None]


def jsonl(path: Path, rows: Sequence[int]) -> None:
    path.with_suffix(".jsonl").write_text("\n".join(json.dumps({"x": i, "text": f"row {i}"}) for i in rows))


def parquet(path: Path, rows: Sequence[int]) -> None:
    table = pa.table({"x": list(rows), "text": [f"row {i}" for i in rows]})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=max(1, len(rows) // 3))


def view(folder: Path, indices: Sequence[int] | None = None, **options: Any) -> DatasetView:
    chosen = None if indices is None else np.array(indices, np.int64)
    return DatasetView(Dataset([folder], cache=folder / "cache", **options), {}, chosen)


WRITERS = pytest.mark.parametrize("write", [jsonl, parquet])
ROWS = list(range(200))
CASES: dict[str, tuple[list[int], str | None]] = {
    "the same": (ROWS, None),
    "appended": ([*ROWS, 200, 201], None),
    "first removed": (ROWS[1:], "has 199 rows, of 200"),
    "first removed, one appended": ([*ROWS[1:], 200], "the first 200 rows of .* have changed"),
    "two exchanged": ([*ROWS[:50], 51, 50, *ROWS[52:]], "the first 200 rows of .* have changed"),
    "reversed": (ROWS[::-1], "the first 200 rows of .* have changed"),
    "one put before": ([-1, *ROWS], "the first 200 rows of .* have changed"),
    "last removed": (ROWS[:-1], "has 199 rows, of 200"),
}


@WRITERS
@pytest.mark.parametrize("case", CASES)
def test_a_change_of_the_rows_is_named_and_more_behind_them_is_none(tmp_path: Path, write: Write, case: str) -> None:
    write(tmp_path / "a", ROWS)
    known = json.loads(json.dumps(fingerprint.fingerprint(view(tmp_path))))
    after, problem = CASES[case]
    write(tmp_path / "a", after)
    found = changes(view(tmp_path), known)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(problem, found)
        assert str(tmp_path / "a.") in found


@WRITERS
def test_files_may_follow_the_last_one_and_only_that_may_grow(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "b", ROWS[:50])
    write(tmp_path / "d", ROWS[50:])
    known = fingerprint.fingerprint(view(tmp_path))
    assert changes(view(tmp_path), known) is None
    write(tmp_path / "d", [*ROWS[50:], 200])
    write(tmp_path / "e", [300])
    assert changes(view(tmp_path), known) is None
    write(tmp_path / "b", [*ROWS[:50], 201])
    assert "b." in (found := str(changes(view(tmp_path), known)))
    assert "has more rows than when the checkpoint was written, and rows of other files come after" in found
    write(tmp_path / "b", ROWS[:50])
    write(tmp_path / "c", ROWS[60:160])
    assert ", which is where d." in (found := str(changes(view(tmp_path), known)))
    assert "have changed" in found or "has 100 rows" in found
    for file in tmp_path.glob("[cde].*"):
        file.unlink()
    assert "is no longer there" in str(changes(view(tmp_path), known))


def test_other_rows_of_the_same_files_are_a_change(tmp_path: Path) -> None:
    jsonl(tmp_path / "a", ROWS)
    known = fingerprint.fingerprint(view(tmp_path, [0, 5, 9]))
    assert changes(view(tmp_path, [0, 5, 9]), known) is None
    for other in (None, [0, 5], [0, 5, 8], [0, 5, 9, 12]):
        assert "used now" in str(changes(view(tmp_path, other), known))
    jsonl(tmp_path / "a", [*ROWS, 200, 201])
    assert changes(view(tmp_path, [0, 5, 9, 201]), known) is None


def test_bad_rows_that_are_skipped_are_a_part_of_it(tmp_path: Path) -> None:
    jsonl(tmp_path / "a", ROWS)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("\nno json\n")
    known = fingerprint.fingerprint(view(tmp_path, on_bad_row="skip"))
    assert known["rows"] == 200
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('nothing\n{"x": 1, "text": ""}\n')
    assert changes(view(tmp_path, on_bad_row="skip"), known) is None


def test_large_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_BLOCKS", 8)
    monkeypatch.setattr(dataset, "_BLOCK", 256)
    jsonl(tmp_path / "a", range(4000))
    rows = view(tmp_path)
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, n: int, at: int) -> bytes:
        read.append(n)
        return pread(fd, n, at)

    with monkeypatch.context() as m:
        m.setattr(os, "pread", counted)
        known = fingerprint.fingerprint(rows)
    assert sum(read) < 9 * 256
    jsonl(tmp_path / "a", [*range(1, 4000), 0])
    assert "have changed" in str(changes(view(tmp_path), known))
    jsonl(tmp_path / "a", range(4001))
    assert changes(view(tmp_path), known) is None


class Numbers:
    column_names: tuple[str, ...] = ("x",)

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": i}


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=3),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_row_is_drawn_once_per_epoch_also_the_appended_ones(
    rows: int, growth: list[tuple[int, int]], prompts: int, ahead: int
) -> None:
    """Each resume finds more rows; the epochs that it continues, or has drawn from ahead, end as they began."""
    loader, step = Loader(Numbers(rows), prompts, 1, seed=3), 0
    drawn: list[int] = []
    for steps, more in [*growth, (12, 0)]:
        for _ in range(steps):
            drawn += loader.load(step, 0, 1)[1]["x"]
            step += 1
        before, position = loader, loader.position(step)
        rows += more
        loader = Loader(Numbers(rows), prompts, 1, seed=3)
        loader.resume(json.loads(json.dumps(before.eras)), position + ahead)
        assert before._order(position, ahead) == loader._order(position, ahead)
    place = 0
    for (start, size), (end, _) in zip(loader.eras, [*loader.eras[1:], (len(drawn), 0)], strict=True):
        assert start == place or start >= len(drawn)
        for first in range(start, end, size):
            epoch = drawn[first : min(first + size, end)]
            assert len(set(epoch)) == len(epoch)
            assert not epoch or max(epoch) < size
            if first + size <= min(end, len(drawn)):
                assert sorted(epoch) == list(range(size))
        place = end
