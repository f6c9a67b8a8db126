"""The log of a worker: appended to, never above its limit, and never the end of a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.observe import bounded_log
from distflow.observe.bounded_log import BoundedLog


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


def test_a_log_that_cannot_be_written_warns_once_and_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(bounded_log.logger, "warning", lambda text, *args: warned.append(text % args))
    (tmp_path / "spans").write_text("a file where the folder should be")
    log = BoundedLog(tmp_path / "spans" / "0.jsonl", 1000, step_of)
    log.open(0)
    log.append([b"0\n"])
    assert not log.keeps(0)
    log.append([b"1\n"])
    assert len(warned) == 1
    assert "nothing more is recorded there" in warned[0]
