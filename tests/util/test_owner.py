"""A folder of a run has one owner: what is left of one that is gone is taken over, one that lives is not disturbed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.errors import ConfigError, DistflowError
from distflow.util.owner import Owner, OwnerView, Record, check_owner
from limits import load_factor, wait_until

HOLD = "import sys, time; from pathlib import Path; from distflow.util.owner import Owner\n"
HOLD += "owner = Owner(Path(sys.argv[1])); print('owned', flush=True); time.sleep(1000)"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.communicate()


def write_record_of_another_host(folder: Path, number: int = 1, **changes: object) -> Path:
    record = replace(Record.own(), kernel="another", host="node7", nonce="abc", **changes)  # type: ignore[arg-type]
    path = folder / f".owner.{number}"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:  # in place, as owners write: never empty
        file.write(record.pack())
    return path


def test_an_owner_that_lives_is_named(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    with pytest.raises(ConfigError, match=rf"another run is writing to {tmp_path}, on \S+ \(pid {holder.pid}, since "):
        Owner(tmp_path)
    assert OwnerView(tmp_path).is_alive()


def test_where_files_cannot_be_locked_an_owner_that_lives_is_named(
    tmp_path: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lock file is as good as locks that do not work."""
    (tmp_path / ".lock").unlink()
    monkeypatch.setattr("distflow.util.owner._locks_work", lambda lock: False)
    with pytest.raises(ConfigError, match="another run is writing to"):
        Owner(tmp_path)


def test_what_a_killed_owner_leaves_is_taken_over_at_once(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert OwnerView(tmp_path).is_alive() is False
    with Owner(tmp_path, stale_s=1e9) as owner:
        check_owner(owner.token)


def test_a_released_folder_is_taken_at_once(tmp_path: Path) -> None:
    write_record_of_another_host(tmp_path, released=True)
    with Owner(tmp_path, stale_s=1e9) as owner:
        check_owner(owner.token)
        assert [p.name for p in tmp_path.glob(".owner.*")] == [".owner.2"]
    assert OwnerView(tmp_path).is_alive() is False


def test_an_owner_on_another_host_that_gives_signs_of_life_keeps_its_folder(tmp_path: Path) -> None:
    path, over = write_record_of_another_host(tmp_path), threading.Event()

    def renew() -> None:
        renewed = 0
        while not over.wait(0.02):
            renewed += 1
            write_record_of_another_host(tmp_path, renewed=renewed)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"another run is writing to .* on node7 \(pid"):
            Owner(tmp_path, stale_s=60)
    finally:
        over.set()
        thread.join()
    assert path.exists()


def test_a_silent_owner_on_another_host_is_replaced_after_a_while(tmp_path: Path) -> None:
    """Whatever the clocks of the two hosts say: its record may be of tomorrow."""
    write_record_of_another_host(tmp_path, since="2999-01-01T00:00:00+00:00")
    with Owner(tmp_path, stale_s=0.2) as owner:
        check_owner(owner.token)


def test_an_owner_that_was_replaced_learns_it_and_harms_nobody(tmp_path: Path) -> None:
    lost = threading.Event()
    said: list[str] = []

    def on_lost(why: str) -> None:
        said.append(why)
        lost.set()

    first = Owner(tmp_path, on_lost, renew_s=0.01)
    new = write_record_of_another_host(tmp_path, 2)
    written = new.read_bytes()
    next(tmp_path.glob(".owner.1")).unlink()
    with pytest.raises(DistflowError, match=r"has lost .* to another one, on node7"):
        check_owner(first.token)
    assert lost.wait(60 * load_factor())
    assert "on node7" in said[0]
    first.release()
    assert new.read_bytes() == written


def test_a_folder_that_was_emptied_is_said_so(tmp_path: Path) -> None:
    with Owner(tmp_path) as owner:
        for path in tmp_path.iterdir():
            path.unlink()
        with pytest.raises(DistflowError, match="was emptied or replaced while the run wrote to it"):
            check_owner(owner.token)


def test_of_many_that_find_a_dead_owner_one_wins(tmp_path: Path) -> None:
    """They are on hosts that do not see each other's locks."""
    write_record_of_another_host(tmp_path)
    text = (
        "import sys, time; from pathlib import Path; from distflow.util import owner\n"
        "owner.LOCK = f'.lock{sys.argv[2]}'; owner._kernel = lambda: sys.argv[2]\n"
        "try: owner.Owner(Path(sys.argv[1]), renew_s=0.05, stale_s=2)\n"
        "except owner.ConfigError as e: print('refused', flush=True)\n"
        "else: print('owned', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", text, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    rivals = [subprocess.Popen([*command, str(n)], text=True, **pipes) for n in range(4)]  # type: ignore[call-overload]
    said = sorted(rival.stdout.readline() for rival in rivals)
    for rival in rivals:
        rival.communicate()
    assert said == ["owned\n", "refused\n", "refused\n", "refused\n"]


def test_a_page_sees_an_owner_on_another_host_by_its_renewals(tmp_path: Path) -> None:
    write_record_of_another_host(tmp_path)
    view = OwnerView(tmp_path)
    assert view.is_alive() is None  # not known yet
    write_record_of_another_host(tmp_path, renewed=1)
    assert view.is_alive()


def test_renewals_go_on_after_a_time_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Owner) -> None:
        raise OSError(28, "No space left on device")

    write = Owner._write
    monkeypatch.setattr(Owner, "_write", fail)
    with Owner(tmp_path, renew_s=0.01) as owner:
        time.sleep(0.05)
        monkeypatch.setattr(Owner, "_write", write)
        wait_until(lambda: json.loads((tmp_path / ".owner.1").read_text())["renewed"])
        check_owner(owner.token)
