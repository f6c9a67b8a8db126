"""The version is written in the package; what else names it agrees."""

import re
from pathlib import Path

from distflow import __version__

ROOT = Path(__file__).parent.parent


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) – (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = (ROOT / "CITATION.cff").read_text()
    assert released[0] == (__version__, re.findall(r"^date-released: (.*)$", citation, re.M)[0])
    assert re.findall(r"^version: (.*)$", citation, re.M) == [__version__]
    assert sorted(released, key=lambda r: [int(n) for n in r[0].split(".")], reverse=True) == released
