"""The data set: rows are found without reading the rest, indexed once per host, and errors name file and line."""

import json
import multiprocessing
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distflow.dataset.dataset as dataset_module
from distflow.dataset.dataset import Dataset
from distflow.errors import DataError
from distflow.util.files import replacing
from limits import load_factor

VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 2?\nThink."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0, "split": "train"},
}


class Write(Protocol):
    def __call__(self, name: str, text: str | bytes) -> Path: ...


class WriteParquet(Protocol):
    def __call__(self, name: str, rows: list[dict[str, Any]], **options: int) -> Path: ...


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def parquet(tmp_path: Path) -> WriteParquet:
    def parquet(name: str, rows: list[dict[str, Any]], **options: int) -> Path:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name, **options)
        return tmp_path / name

    return parquet


def all_rows(dataset: Dataset) -> list[dict[str, Any]]:
    return [dataset[i] for i in range(len(dataset))]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- reading


def test_rows_have_the_given_fields(write: Write, cache: Path) -> None:
    file = write("a.jsonl", lines([{"x": i, "y": str(i), "z": None} for i in range(5)]))
    dataset = Dataset([file], fields=["y", "x"], cache=cache)
    assert len(dataset) == 5
    assert dataset.column_names == ("y", "x")
    assert dataset[3] == {"y": "3", "x": 3}
    assert dataset.location(3) == f"{file}:4"
    assert (dataset.skipped, dataset.skipped_count) == ([], 0)
    for i in (-1, 5):
        with pytest.raises(IndexError, match=f"row {i} of 5"):
            dataset[i]


def test_the_default_fields_are_those_of_the_first_row(write: Write, cache: Path) -> None:
    dataset = Dataset([write("a.jsonl", '{"p": 1, "q": 2}\n{"q": 3, "p": 4, "more": 5}\n')], cache=cache)
    assert dataset.column_names == ("p", "q")
    assert dataset[1] == {"p": 4, "q": 3}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_are_skipped_but_counted(write: Write, cache: Path, end: str) -> None:
    text = end.join(["", '{"x": 1}', "  ", "\t", ' {"x": 2} ', "", '{"x": 3}'])
    dataset = Dataset([write("a.jsonl", b"\xef\xbb\xbf" + text.encode())], cache=cache)
    assert all_rows(dataset) == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert [dataset.location(i).rpartition(":")[2] for i in range(3)] == ["2", "5", "7"]


@pytest.mark.parametrize("text", ['{"x": 1}', '{"x": 1}\n', '\ufeff{"x": 1}', '{"x": 1}\n\n\n', '\n\n{"x": 1}'])
def test_a_file_of_one_row(write: Write, cache: Path, text: str) -> None:
    assert all_rows(Dataset([write("a.jsonl", text)], cache=cache)) == [{"x": 1}]


def test_text_arrives_unchanged(write: Write, parquet: WriteParquet, cache: Path) -> None:
    texts = [
        "naïve 日本 🙂",
        "line\u2028separator\u2029\x85\x0b\x0c\x1c",
        'quote " \\ \n \r\n \t',
        "",
        " \ufeff ",
        "\x00",
    ]
    expected = [{"x": t} for t in texts]
    assert all_rows(Dataset([write("a.jsonl", lines(expected))], cache=cache)) == expected
    assert all_rows(Dataset([parquet("a.parquet", expected)], cache=cache)) == expected


def test_verl_rows(write: Write, parquet: WriteParquet, cache: Path) -> None:
    for file in write("a.jsonl", lines([VERL])), parquet("a.parquet", [VERL]):
        assert Dataset([file], cache=cache)[0] == VERL
        assert Dataset([file], fields=["prompt"], cache=cache)[0] == {"prompt": VERL["prompt"]}


ROW = st.fixed_dictionaries({"x": st.text(), "y": st.recursive(st.integers() | st.text(), st.lists, max_leaves=5)})


@given(st.lists(ROW, min_size=1), st.sampled_from([1, 7, 64, 1 << 24]), st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rows_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[dict[str, Any]],
    chunk: int,
    ascii_only: bool,
) -> None:
    monkeypatch.setattr(dataset_module, "_CHUNK", chunk)
    home = tmp_path_factory.mktemp("any")
    file = home / "a.jsonl"
    file.write_text("\n".join(json.dumps(r, ensure_ascii=ascii_only) for r in expected), encoding="utf-8", newline="")
    assert all_rows(Dataset([file], cache=home / "cache")) == expected


def test_parquet_rows_over_many_batches_and_row_groups(
    parquet: WriteParquet, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BATCH", 7)
    expected = [{"x": i, "y": {"a": [str(i)] * (i % 3)}} for i in range(100)]
    file = parquet("a.parquet", expected, row_group_size=30)
    dataset = Dataset([file], cache=cache)
    assert all_rows(dataset) == expected
    assert dataset.location(99) == f"{file}:100"


def test_parquet_dictionaries_become_values(tmp_path: Path, cache: Path) -> None:
    column = pa.array([f"c{i % 9}" for i in range(90)]).dictionary_encode()
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet", row_group_size=10)
    assert [r["x"] for r in all_rows(Dataset([tmp_path / "a.parquet"], cache=cache))] == [
        f"c{i % 9}" for i in range(90)
    ]


def test_parquet_that_would_fill_the_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value, written once and meant thousands of times: a small file of many rows."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * 100_000]))
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": column}), file, compression="zstd")
    assert file.stat().st_size < 100_000
    message = error([file], cache=cache)
    assert re.fullmatch(
        rf"{file}: its [0-9]+ kB become more than 67 MB of rows; if they are meant to, write them as .jsonl", message
    )
    assert not [p for p in cache.iterdir() if p.suffix != ".lock"]
    monkeypatch.setattr("distflow.dataset.dataset._SMALL", 1 << 30)
    assert len(Dataset([file], cache=cache)) == 2000


def test_only_the_given_columns_are_converted(parquet: WriteParquet, cache: Path) -> None:
    file = parquet("a.parquet", [{"x": i, "image": os.urandom(10_000)} for i in range(100)])
    assert Dataset([file], fields=["x"], cache=cache)[7] == {"x": 7}
    assert sum(f.stat().st_size for f in cache.iterdir()) < 20_000


# --- many files


def test_files_are_joined_in_their_order(write: Write, parquet: WriteParquet, cache: Path) -> None:
    files = [
        write("b.jsonl", '{"x": 0}\n{"x": 1}\n'),
        write("empty.jsonl", ""),
        parquet("c.parquet", [{"x": 2}]),
        write("a.ndjson", '{"x": 3}'),
        write("d.json", '{"x": 4}'),
    ]
    dataset = Dataset(files, cache=cache)
    assert [r["x"] for r in all_rows(dataset)] == [0, 1, 2, 3, 4]
    assert [dataset.location(i) for i in (1, 2, 3)] == [f"{files[0]}:2", f"{files[2]}:1", f"{files[3]}:1"]


def test_a_directory_and_a_pattern_are_sorted(write: Write, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in "d/2.jsonl", "d/1.JSONL", "d/10.jsonl":
        write(name, json.dumps({"x": name}))
    write("d/README.md", "not data")
    assert [r["x"] for r in all_rows(Dataset([tmp_path / "d"], cache=cache))] == [
        "d/1.JSONL",
        "d/10.jsonl",
        "d/2.jsonl",
    ]
    assert [r["x"] for r in all_rows(Dataset(str(tmp_path / "d/*.jsonl"), cache=cache))] == [
        "d/10.jsonl",
        "d/2.jsonl",
    ]
    assert len(Dataset([str(tmp_path / "**/*.jsonl")], cache=cache)) == 2


def test_a_name_that_looks_like_a_pattern_is_a_name_first(write: Write, cache: Path) -> None:
    assert len(Dataset([write("a[1].jsonl", '{"x": 1}')], cache=cache)) == 1


# --- errors


def error(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(DataError) as e:
        all_rows(Dataset(*args, **kwargs))
    return str(e.value)


WAY_OUT = " – fix the row or set `data.on_bad_row: skip`"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"x": 1', """{"x": 1 is not a JSON object on one line (Expecting ',' delimiter at column 8)"""),
        ("[1, 2]", "[1, 2] is not a JSON object on one line (it is a list)"),
        ("[", "[ is not a JSON object on one line (Expecting value at column 2)"),
        ('"text"', '"text" is not a JSON object on one line (it is a str)'),
        ('{"promt": 1}', """{"promt": 1} has no field 'x'; known: promt"""),
        ('{"X_": 1, "x_": 2}', """{"X_": 1, "x_": 2} has no field 'x'; did you mean 'x_'?"""),
        ("\x00\x00", "?? is not a JSON object on one line (Expecting value at column 1)"),
        ('{"x": 1}{"x": 2}', '{"x": 1}{"x": 2} is not a JSON object on one line (Extra data at column 9)'),
        ("[" * 100_000, "[" * 79 + "… is not a JSON object on one line (maximum recursion depth exceeded"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write: Write, cache: Path, bad: str, reason: str) -> None:
    file = write("a.jsonl", '{"x": 0}\n\n' + bad + "\n\n")
    dataset = Dataset([file], fields=["x"], cache=cache)
    assert dataset[0] == {"x": 0}
    message = error([file], fields=["x"], cache=cache)
    assert message.startswith(f"{file}:3: {reason}")
    assert message.endswith(WAY_OUT)
    skipping = Dataset([file], fields=["x"], on_bad_row="skip", cache=cache)
    assert all_rows(skipping) == [{"x": 0}]
    assert skipping.skipped_count == 1
    assert skipping.skipped[0].startswith(f"{file}:3: {reason}")


def test_bytes_that_are_not_text(write: Write, cache: Path) -> None:
    file = write("a.jsonl", b'{"x": "\xff\xfe"}')
    assert "a.jsonl:1: " in error([file], cache=cache)
    assert "'utf-8' codec can't decode byte 0xff in position 7" in error([file], cache=cache)


def test_a_long_bad_row_is_cut(write: Write, cache: Path) -> None:
    message = error([write("a.jsonl", '{"x": "' + "é" * 500 + '"}')], fields=["y"], cache=cache)
    assert '{"x": "' + "é" * 72 + "… has no field" in message


def test_a_missing_file_suggests_a_similar_name(write: Write, tmp_path: Path, cache: Path) -> None:
    write("train.jsonl", "{}")
    assert error([tmp_path / "trian.jsonl"], cache=cache) == (
        f"{tmp_path}/trian.jsonl: no such file; did you mean 'train.jsonl'?"
    )
    assert "no such file; there are none; a split of the hub is hub:OWNER/NAME/CONFIG/SPLIT" in error(
        [tmp_path / "nowhere" / "a.jsonl"], cache=cache
    )


def test_no_files_or_no_rows(write: Write, tmp_path: Path, cache: Path) -> None:
    write("a.jsonl", "\n \n")
    (tmp_path / "d").mkdir()
    assert error([], cache=cache).startswith("no data files are given; name at least one (.jsonl, ")
    assert f"{tmp_path}/*.parquet: no such file; known: a.jsonl, d" in error([tmp_path / "*.parquet"], cache=cache)
    assert f"{tmp_path}/d: no .jsonl, .json, .ndjson, .parquet in it" in error([tmp_path / "d"], cache=cache)
    message = error([tmp_path / "a.jsonl"], cache=cache)
    assert message == f"{tmp_path}/a.jsonl: no rows; give files with at least one row"


def test_an_unknown_kind_of_file(write: Write, cache: Path) -> None:
    assert "a.csv: cannot read '.csv' files; convert it to one of .jsonl" in error([write("a.csv", "")], cache=cache)


def test_a_parquet_file_that_is_none(write: Write, cache: Path) -> None:
    message = error([write("a.parquet", '{"x": 1}\n')], cache=cache)
    assert "a.parquet: cannot be read as Parquet (" in message
    assert "write it again" in message
    assert not [f for f in cache.iterdir() if f.suffix in (".arrow", ".part")]


def test_parquet_with_a_damaged_page(parquet: WriteParquet, cache: Path) -> None:
    file = parquet("a.parquet", [{"x": "text" * i} for i in range(1000)])
    data = bytearray(file.read_bytes())
    data[4:60] = b"\xff" * 56
    file.write_bytes(data)
    message = error([file], cache=cache)
    assert message.startswith(f"{file}: cannot be ")
    assert not list(cache.glob("*.arrow"))


def test_a_file_that_disappears(write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*args: object) -> None:
        raise OSError(116, "Stale file handle")

    dataset = Dataset([write("a.jsonl", '{"x": 1}')], cache=cache)
    monkeypatch.setattr(os, "pread", stale)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read any more: \[Errno 116\] Stale file handle"):
        dataset[0]


def test_a_parquet_column_that_is_not_there(parquet: WriteParquet, cache: Path) -> None:
    file = parquet("a.parquet", [{"prompt": "a", "answer": "b"}])
    for policy in ("error", "skip"):
        message = error([file], fields=["promt"], on_bad_row=policy, cache=cache)
        assert message == f"{file}: has no column 'promt'; did you mean 'prompt'?"


def test_a_parquet_file_without_rows(tmp_path: Path, cache: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert "no rows" in error([tmp_path / "a.parquet"], cache=cache)


def test_a_parquet_row_that_is_not_text(tmp_path: Path, cache: Path) -> None:
    column = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff\xfe"]).buffers())
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    assert f"{tmp_path}/a.parquet:2: the row cannot be read ('utf-8' codec" in error(
        [tmp_path / "a.parquet"], cache=cache
    )
    assert all_rows(Dataset([tmp_path / "a.parquet"], on_bad_row="skip", cache=cache)) == [{"x": "ok"}]


@pytest.mark.parametrize("change", [b"", b'{"x": 10}\n', b'{"y": 0, "x": 1}\n' * 200])
def test_a_file_that_changes_while_in_use(write: Write, cache: Path, change: bytes) -> None:
    file = write("a.jsonl", lines([{"x": i} for i in range(100)]))
    dataset = Dataset([file], cache=cache)
    file.write_bytes(change)
    os.utime(file, (1, 1))  # the clock may be too coarse for a test
    with pytest.raises(DataError, match=r"a\.jsonl: the file changed while it was in use; do not change it"):
        dataset[90]


def test_a_file_that_is_replaced_or_grows_is_read_as_it_was(write: Write, cache: Path) -> None:
    file = write("a.jsonl", '{"x": 1}')
    dataset = Dataset([file], cache=cache)
    with file.open("a") as f:
        f.write('\n{"x": 2}')
    assert all_rows(dataset) == [{"x": 1}]
    write("new.jsonl", "gone").replace(file)
    assert all_rows(dataset) == [{"x": 1}]


# --- skipping


def test_skipped_rows_are_counted_and_the_first_twenty_described(write: Write, cache: Path) -> None:
    file = write("a.jsonl", "".join(f'{{"x": {i}}}\n' if i % 3 else "bad\n" for i in range(100)))
    other = write("b.jsonl", 'bad\n{"x": 100}\n')
    for _ in range(2):  # searched, then cached
        dataset = Dataset([file, other], on_bad_row="skip", cache=cache)
        assert [r["x"] for r in all_rows(dataset)] == [i for i in range(101) if i % 3 or i == 100]
        assert [dataset.location(i).rpartition("/")[2] for i in (0, 2, 65, 66)] == [
            "a.jsonl:2",
            "a.jsonl:5",
            "a.jsonl:99",
            "b.jsonl:2",
        ]
        assert dataset.skipped_count == 35
        assert len(dataset.skipped) == 20
        assert dataset.skipped[1].startswith(f"{file}:4: bad is not a JSON object on one line (")


@given(st.lists(st.booleans(), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whichever_rows_are_bad_the_others_remain(tmp_path_factory: pytest.TempPathFactory, good: list[bool]) -> None:
    home = tmp_path_factory.mktemp("skip")
    (home / "a.jsonl").write_text("".join(f'{{"x": {i}}}\n' if ok else "bad\n" for i, ok in enumerate(good)))
    if not any(good):
        message = error([home / "a.jsonl"], on_bad_row="skip", cache=home / "cache")
        assert f"; all {len(good)} were skipped, the first is {home}/a.jsonl:1: bad is not" in message
        return
    dataset = Dataset([home / "a.jsonl"], on_bad_row="skip", cache=home / "cache")
    assert [r["x"] for r in all_rows(dataset)] == [i for i, ok in enumerate(good) if ok]
    assert dataset.skipped_count == good.count(False)


def test_which_rows_are_bad_depends_on_the_fields(write: Write, cache: Path) -> None:
    file = write("a.jsonl", '{"x": 1}\n{"y": 1}\n')
    for field, line in ("x", 1), ("y", 2):
        dataset = Dataset([file], fields=[field], on_bad_row="skip", cache=cache)
        assert (len(dataset), dataset.location(0)) == (1, f"{file}:{line}")
        assert "has no field" in dataset.skipped[0]


def test_the_default_fields_are_those_of_the_first_good_row(write: Write, cache: Path) -> None:
    files = [write("a.jsonl", "bad\n"), write("b.jsonl", 'bad\n{"x": 1}\n{"y": 1}\n')]
    dataset = Dataset(files, on_bad_row="skip", cache=cache)
    assert (dataset.column_names, len(dataset), dataset.skipped_count) == (("x",), 1, 3)


# --- the cache


def test_a_worker_reads_only_its_share(write: Write, cache: Path) -> None:
    file = write("a.jsonl", lines([{"x": i, "text": "t" * 1000} for i in range(20_000)]))
    Dataset([file], cache=cache)  # as another worker of the host did
    tracemalloc.start()
    with patch("os.pread", wraps=os.pread) as pread:
        dataset = Dataset([file], fields=["x"], cache=cache)
        assert [dataset[i]["x"] for i in range(7, 20_000, 1000)] == list(range(7, 20_000, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(call.args[1] for call in pread.call_args_list) < 21 * 1100
    assert peak < 200_000 < file.stat().st_size / 100


def test_converted_parquet_stays_on_disk(parquet: WriteParquet, cache: Path) -> None:
    file = parquet("a.parquet", [{"x": i, "text": os.urandom(500).hex()} for i in range(10_000)])
    before = pa.total_allocated_bytes()
    dataset = Dataset([file], cache=cache)
    assert dataset[5000]["x"] == 5000
    assert pa.total_allocated_bytes() - before < 100_000


def test_the_cache_follows_the_file(write: Write, cache: Path) -> None:
    file = write("a.jsonl", '{"x": 1}\n')
    assert len(Dataset([file], cache=cache)) == 1
    file.write_text('{"x": 1}\n{"x": 2}\n')
    assert len(Dataset([file], cache=cache)) == 2


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 64, None])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_damaged_cache_is_built_again(
    write: Write, parquet: WriteParquet, cache: Path, name: str, damage: bytes | None
) -> None:
    expected = [{"x": i} for i in range(50)]
    file = write(name, lines(expected)) if name == "a.jsonl" else parquet(name, expected)
    Dataset([file], on_bad_row="skip", cache=cache)
    for entry in cache.iterdir():
        entry.write_bytes(entry.read_bytes()[:-9] if damage is None else damage)
    assert all_rows(Dataset([file], on_bad_row="skip", cache=cache)) == expected


def test_a_killed_build_leaves_nothing_behind_that_is_used(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("a.jsonl", '{"x": 1}\n{"x": 2}\n')

    class Killed(BaseException):
        pass

    def kill(*args: object) -> None:
        raise Killed

    with monkeypatch.context() as m:
        m.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            Dataset([file], cache=cache)
    assert all_rows(Dataset([file], cache=cache)) == [{"x": 1}, {"x": 2}]


def _open_and_count(files: list[Path], cache: Path, barrier: Any, results: Any) -> None:
    with patch("distflow.dataset.cache.replacing", wraps=replacing) as build:
        barrier.wait()
        dataset = Dataset(files, on_bad_row="skip", cache=cache)
        results.put((build.call_count, len(dataset), dataset[len(dataset) - 1]["x"]))


def test_workers_that_start_together_build_the_index_once(write: Write, parquet: WriteParquet, cache: Path) -> None:
    files = [write("a.jsonl", lines([{"x": i} for i in range(20_000)])), parquet("b.parquet", [{"x": 1}] * 5000)]
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_open_and_count, args=(files, cache, barrier, results)) for _ in range(4)]
    for w in workers:
        w.start()
    outcomes = [results.get(timeout=30 * load_factor()) for _ in workers]
    for w in workers:
        w.join(timeout=30 * load_factor())
    assert [s[1:] for s in outcomes] == [(25_000, 1)] * 4
    assert sum(s[0] for s in outcomes) == 4  # per file: where its rows are, and which are bad


def test_the_cache_is_in_the_users_directory_or_a_private_one(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("a.jsonl", '{"x": 1}\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Dataset([file])
    assert list((tmp_path / "xdg" / "distflow").glob("a-*.lines"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file cannot be a directory
    Dataset([file])
    private = tmp_path / f"distflow-{os.getuid()}"
    assert list(private.glob("a-*.lines"))
    assert private.stat().st_mode & 0o777 == 0o700
    assert error([file], cache=file / "no") == (
        f"{file}/no: the cache of data files cannot be there: it cannot be written; choose another directory"
        " (XDG_CACHE_HOME)"
    )


def test_a_full_disk_is_reported_and_leaves_no_partial_file(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    file = write("a.jsonl", '{"x": 1}\n')
    monkeypatch.setattr(os, "fsync", full)
    message = error([file], cache=cache)
    assert f"{file}: cannot be prepared in {cache}: [Errno 28] No space left on device; check the file" in message
    assert not list(cache.glob("*.part"))


def test_files_are_closed_with_the_data_set(write: Write, cache: Path) -> None:
    file = write("a.jsonl", '{"x": 1}\n')
    dataset = Dataset([file], cache=cache)

    def held() -> int:
        return sum(os.path.realpath(f) == str(file.resolve()) for f in Path("/proc/self/fd").iterdir())

    assert held() == 1
    del dataset
    assert held() == 0


def test_the_scan_is_fast(write: Write, cache: Path) -> None:
    """Not a line at a time: a scan makes a handful of calls, whatever the number of lines."""
    file = write("a.jsonl", '{"x": 1}\n' * 100_000)
    with patch("os.pread", wraps=os.pread) as pread, patch("numpy.frombuffer", wraps=np.frombuffer) as frombuffer:
        assert len(Dataset([file], cache=cache)) == 100_000
    assert pread.call_count + frombuffer.call_count < 10
