"""A file is the old one or the new one, whatever happens while it is written."""

from pathlib import Path

import pytest

from distflow.util.files import replacing, write_atomically


def test_a_file_that_cannot_be_completed_leaves_the_old_one(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as file:
        file.writelines([b"new, but ", None])  # type: ignore[list-item]
    assert (tmp_path / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_text() == "new"
