"""The example of docs/own-algorithm.md, which tests/test_own_algorithm.py compares with the page."""

import json
from pathlib import Path

import pytest

from warm import distflow_run

HERE = Path(__file__).parents[2] / "examples" / "own"


@pytest.mark.parametrize(
    ("name", "logged"),
    [("own", "own/running_mean"), ("own_list", "own/running_mean"), ("adaptive_kl", "actor/kl_weight")],
)
def test_it_runs(tmp_path: Path, name: str, logged: str) -> None:
    for path in HERE.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ended = distflow_run(tmp_path / f"{name}.yaml", "steps=1", workers=2, folder=tmp_path)
    assert ended.codes == [0, 0], ended.err
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    assert [logged in json.loads(line) for line in lines] == [True]
