"""The log of a worker: appended to, never above its limit, and never the end of a run."""

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.observe import bounded_log
from distflow.observe.bounded_log import BoundedLog
from distflow.util import patient_files
from distflow.util.lines import row_step
from full import largest_file


def step_of(line: bytes) -> int | None:
    return int(line) if line.endswith(b"\n") and line.strip().lstrip(b"-").isdigit() else None


def steps(path: Path) -> list[int]:
    return [int(line) for line in path.read_bytes().splitlines()]


@given(st.integers(1, 400), st.integers(8, 200))
def test_it_never_outgrows_its_limit_and_keeps_evenly_spaced_steps(count: int, limit: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        log = BoundedLog(Path(folder) / "spans" / "0.jsonl", limit, step_of)
        log.open(0)
        for step in range(count):
            if log.keeps(step):
                log.append([b"%d\n" % step])
            assert log.path.stat().st_size <= max(limit, 4)
        log.close()
        assert steps(log.path) == list(range(0, count, log.stride))


def test_a_run_that_is_continued_loses_the_later_steps_and_a_line_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"0\n1\n2\n3\n4")
    log = BoundedLog(path, 1000, step_of)
    log.open(2)
    log.append([b"3\n"])
    assert steps(path) == [0, 1, 2, 3]
    log.close()
    log.open(0)  # a new run
    assert steps(path) == []


def test_what_came_before_the_first_step_is_always_kept(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "0.jsonl", 12, step_of)
    log.open(0)
    for step in range(20):
        if log.keeps(step):
            log.append([b"%d\n" % step])
    assert steps(log.path)[0] == 0


def test_a_log_that_cannot_be_written_warns_once_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(patient_files.logger, "warning", lambda text, *args: warned.append(text % args))
    (tmp_path / "spans").write_text("a file where the folder should be")
    log = BoundedLog(tmp_path / "spans" / "0.jsonl", 1000, step_of)
    log.open(0)
    log.append([b"0\n"])
    assert log.keeps(1)
    log.append([b"1\n"])
    assert len(warned) == 1
    assert warned[0].startswith(f"{log.path}: cannot be written (")
    (tmp_path / "spans").unlink()
    log.append([b"2\n"])
    log.close()
    assert steps(log.path) == [0, 1, 2]
    assert len(warned) == 2
    assert re.fullmatch(rf"{log.path}: is written again, after 3 failed writes \(.*\); nothing is lost", warned[1])


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 120)), max_size=30))
def test_whatever_the_room_the_file_ends_with_a_whole_line_and_gets_all(writes: list[tuple[int, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        log, step = BoundedLog(Path(folder) / "0.jsonl", 1 << 20, step_of), 0
        log.open(0)
        for count, room in writes:
            lines = [b"%d\n" % (step + i) for i in range(count)]
            step += count
            with largest_file(room):
                log.append(lines)
            assert log.path.read_bytes()[-1:] in (b"", b"\n")
        log.append([b"%d\n" % step])
        log.close()
        assert steps(log.path) == list(range(step + 1))


def test_a_run_that_is_continued_on_a_full_disk_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "0.jsonl"
    for lines, kept in ((b"0\n1\n2\n3\n4", [0, 1, 2]), (b"0\n1\n9\n2\n3\n", [0, 1, 2])):  # in place; with a copy
        path.write_bytes(lines)
        log = BoundedLog(path, 1000, step_of)
        with largest_file(0):
            log.open(2)
            log.append([b"3\n"])
        log.append([b"4\n"])
        log.close()
        assert steps(path) == [*kept, 3, 4]


def test_damaged_lines_are_removed_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(bounded_log.logger, "warning", lambda text, *args: warned.append(text % args))
    path = tmp_path / "metrics.jsonl"
    damaged = [b"7\n", b"{}\n", b"\xff\xfe\n", b'{"step": "1"}\n', b"[" * 100_000 + b"\n", b'{"step": null}\n']
    path.write_bytes(b'{"step": 1}\n' + b"".join(damaged) + b'{"step": 2}\n{"step": 3}\n{"ste')
    log = BoundedLog(path, bounded_log.UNLIMITED, row_step)
    log.open(2)
    log.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert warned == [f"{path}: 6 damaged lines, which are of no step, were removed"]


def test_a_file_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "run" / "metrics.jsonl", 1000, step_of)
    log.open(0)
    log.append([b"1\n"])
    shutil.rmtree(tmp_path / "run")
    log.append([b"2\n"])
    assert steps(log.path) == [2]
    log.close()
