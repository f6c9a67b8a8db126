"""Whatever comes from outside is taken, or refused by one error that names it; nothing hangs or eats the memory."""

from pathlib import Path

import pytest

from fuzz.harness import Kind, Report, fuzz
from fuzz.kinds import KINDS


def run(kind: type[Kind], folder: Path, count: int) -> Report:
    made = kind(folder)
    try:
        report = fuzz(made, count)
    finally:
        made.close()
    assert not report.failures, f"{report.told}\n" + "\n".join(report.failures[:20])
    assert report.cases == count
    return report


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_some_junk_of_each_kind(kind: type[Kind], tmp_path: Path) -> None:
    run(kind, tmp_path, kind.quick)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_all_junk_of_each_kind(kind: type[Kind], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(kind, tmp_path, kind.full)
    with capsys.disabled():
        print(f"\n{kind.name}: {report.told}", *report.slow, sep="\n  ")


def test_there_are_enough() -> None:
    assert sum(kind.full for kind in KINDS) >= 10_000
