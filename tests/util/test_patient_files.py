"""Files that a run can do without: full disks are said once, nothing raises, and what was to be written comes later."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.util import patient_files
from distflow.util.patient_files import SharedLog, WholeFiles, WriteErrors
from full import largest_file


@pytest.fixture
def warned() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    patient_files.logger.addHandler(handler)
    yield messages
    patient_files.logger.removeHandler(handler)


def test_a_log_of_several_workers_gets_its_lines_when_there_is_room_again(tmp_path: Path, warned: list[str]) -> None:
    path = tmp_path / "rewards.log"
    log = SharedLog(path)
    log.append(["first"])
    with largest_file(16):
        log.append(["second", "third"])  # of which `second` and a part of `third` fit
        log.append(["fourth"])
    with path.open("a") as other:
        other.write("of another worker\n")
    WriteErrors.take_count()
    log.append(["fifth"])
    whole = [line for line in path.read_text().splitlines() if line in {"first", "second", "third", "fourth", "fifth"}]
    assert whole == ["first", "second", "third", "fourth", "fifth"]
    assert path.read_text().endswith("third\nfourth\nfifth\n")
    assert warned == [
        f"{path}: cannot be written (File too large); the run goes on and tries it again",
        f"{path}: is written again, after 2 failed writes (File too large); nothing is lost",
    ]


def test_lines_that_wait_are_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient_files, "MAX_WAITING", 40)
    log = SharedLog(tmp_path / "log")
    with largest_file(0):
        for i in range(10):
            log.append([f"line {i}..."])
    log.append(["the last"])
    assert log.path.read_text().splitlines() == ["line 8...", "line 9...", "the last"]
    assert warned[-1].endswith("is written again, after 10 failed writes (File too large); 8 entries are lost")


def test_a_description_is_written_as_it_is_last(tmp_path: Path, warned: list[str]) -> None:
    files, path = WholeFiles(), tmp_path / "state.json"
    files.write(path, "one")
    WriteErrors.take_count()
    with largest_file(2):
        files.write(path, "three")
        files.write(path, "four")
        assert path.read_text() == "one"
        assert not list(tmp_path.glob("*.part"))
    assert WriteErrors.take_count() == 2
    files.retry()
    assert path.read_text() == "four"
    files.retry()
    assert len(warned) == 2
    with largest_file(2):
        files.write(path, "five!")
        files.close()
    assert warned[-1] == f"{path}: could not be written up to the end of the run (File too large); 1 entry is lost"
