"""Other users of the machine: what they could put where a run or its cache reads and writes."""

import os
from pathlib import Path

import pytest

from distflow.dataset.cache import HostCache
from distflow.errors import ConfigError, DataError
from distflow.run_folder import make_dir
from distflow.util.owner import Owner
from distflow.util.private_folder import make_private, why_unsafe

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")


def test_a_new_folder_is_for_this_user_alone(tmp_path: Path) -> None:
    make_dir(tmp_path / "runs" / "new")
    assert (tmp_path / "runs" / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shown").mkdir(mode=0o755)
    make_dir(tmp_path / "shown")  # the user has chosen who may read it
    assert (tmp_path / "shown").stat().st_mode & 0o777 == 0o755
    assert not why_unsafe(tmp_path / "shown")


def test_a_folder_where_everybody_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert why_unsafe(tmp_path) == f"everybody may write to {tmp_path}"
    with pytest.raises(ConfigError, match=r"run_dir: everybody may write to .*; choose another one"):
        make_dir(tmp_path)


@as_root
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match=r"run_dir: .* belongs to another user \(uid 65534\)"):
        make_dir(tmp_path)
    make_dir(tmp_path / "mine")


@as_root
@pytest.mark.parametrize("inside", ["", "run"])
def test_a_link_of_another_user_to_a_folder_of_mine(tmp_path: Path, inside: str) -> None:
    """Planted where the run is to be, or in a link of mine on the way."""
    precious, theirs = tmp_path / "precious", tmp_path / "theirs"
    for folder in (precious, theirs):
        folder.mkdir(mode=0o700)
    (theirs / "planted").symlink_to(precious)
    os.chown(theirs / "planted", 65534, 65534, follow_symlinks=False)
    os.chown(theirs, 65534, 65534)
    (tmp_path / "mine").symlink_to(theirs / "planted")
    for path in (theirs / "planted", tmp_path / "mine"):
        with pytest.raises(ConfigError, match=r"run_dir: .*planted is a link that another user \(uid 65534\) has made"):
            make_dir(path / inside)
    assert not list(precious.iterdir())


def test_a_folder_that_others_may_rename(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    make_private(inner)
    assert not why_unsafe(inner, parents=True)
    tmp_path.chmod(0o777)
    assert why_unsafe(inner, parents=True) == f"other users may rename what is in {tmp_path}"
    tmp_path.chmod(0o1777)  # as /tmp: only owners rename
    assert not why_unsafe(inner, parents=True)


@as_root
def test_rows_are_not_planted_in_a_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, temporary = tmp_path / "shared", tmp_path / "tmp"
    for folder in (shared, temporary):
        folder.mkdir()
        folder.chmod(0o1777)
    (shared / "distflow").mkdir()
    os.chown(shared / "distflow", 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert HostCache().folder == temporary / f"distflow-{os.getuid()}"
    os.chown(temporary / f"distflow-{os.getuid()}", 65534, 65534)
    with pytest.raises(DataError, match=r"belongs to another user \(uid 65534\); choose another directory"):
        HostCache()


def test_a_lock_leaves_other_files_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="lock cannot be opened: Too many levels of symbolic links; remove it"):
        Owner(tmp_path)
    (tmp_path / ".lock").unlink()
    os.link(precious, tmp_path / ".lock")
    Owner(tmp_path).release()
    assert precious.read_text() == "precious"
