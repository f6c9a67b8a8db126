"""Any input is accepted, or refused with one error that names it; nothing hangs or takes too much memory."""

from pathlib import Path

import pytest

from fuzz.harness import Kind, Report, fuzz
from fuzz.kinds import KINDS


def run(kind: type[Kind], folder: Path, count: int) -> Report:
    fuzzer = kind(folder)
    try:
        report = fuzz(fuzzer, count)
    finally:
        fuzzer.close()
    assert not report.failures, f"{report.summary}\n" + "\n".join(report.failures[:20])
    assert report.cases == count
    return report


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_some_cases_of_each_kind(kind: type[Kind], tmp_path: Path) -> None:
    run(kind, tmp_path, kind.quick)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_all_cases_of_each_kind(kind: type[Kind], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(kind, tmp_path, kind.full)
    with capsys.disabled():
        print(f"\n{kind.name}: {report.summary}", *report.slow, sep="\n  ")


def test_there_are_enough_cases() -> None:
    assert sum(kind.full for kind in KINDS) >= 10_000
