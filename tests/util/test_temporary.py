"""Temporary folders of processes that were killed are removed; those of others are not touched."""

import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distflow.sandbox.sandbox import ProgramLimits, Sandbox, _make_folder
from distflow.util.temporary import remove_leftovers, temporary_folder

HOLD = (
    "import sys, time; from pathlib import Path; from distflow.util.temporary import temporary_folder\n"
    "with temporary_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(1000)"
)


def test_a_folder_is_removed_once_its_process_was_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (folder / "file").write_text("")
    assert remove_leftovers(tmp_path) == []
    process.kill()
    process.communicate()
    assert remove_leftovers(tmp_path) == [folder]
    assert not folder.exists()


def test_only_our_own_folders_are_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / f"distflow-run-{'0' * 20}").symlink_to(victim)
    for name in ("distflow-1000", "distflow-run-x", "distflow-cache", f"x-distflow-run-{'0' * 20}"):
        (tmp_path / name).mkdir()
    if os.geteuid() == 0:
        (tmp_path / f"distflow-jail-{'1' * 20}").mkdir()
        os.chown(tmp_path / f"distflow-jail-{'1' * 20}", 65534, 65534)
    before = sorted(tmp_path.iterdir())
    assert remove_leftovers(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        assert remove_leftovers(tmp_path) == []
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["run", "jail"])
@pytest.mark.parametrize("moment", ["made", "opened"])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, kind: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, flock, swept = os.mkdir, fcntl.flock, list[Path]()

    def mkdir_and_sweep(*args: Any) -> None:
        mkdir(*args)
        if moment == "made" and not swept:
            swept.extend(remove_leftovers(tmp_path))

    def sweep_and_flock(fd: int, operation: int) -> None:
        if moment == "opened" and not swept and operation == fcntl.LOCK_EX:
            swept.extend(remove_leftovers(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(os, "mkdir", mkdir_and_sweep)
    monkeypatch.setattr(fcntl, "flock", sweep_and_flock)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as stack:
        if kind == "run":
            folder = stack.enter_context(temporary_folder(tmp_path))
        else:
            path, held = _make_folder()
            stack.callback(os.close, held)
            folder = Path(path)
        assert len(swept) == 1
        assert swept != [folder]
        assert remove_leftovers(tmp_path) == []
        assert folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_folder_of_a_jail_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Sandbox(ProgramLimits()) as sandbox:
        assert remove_leftovers(tmp_path) == []
        assert sandbox.run("print(1)").stdout == "1\n"
        folder = Path(sandbox._jail._folder)
    assert not folder.exists()
    folder.mkdir(0o500)  # as one that was killed leaves it
    assert remove_leftovers(tmp_path) == [folder]
