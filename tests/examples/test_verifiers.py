"""The example with a taskset of verifiers, which is optional."""

import json
import shutil
from pathlib import Path

import pytest

from warm import distflow_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers"


@pytest.mark.slow  # verifiers starts a program for each conversation
def test_an_episode_of_verifiers(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    folder = tmp_path / "verifiers"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    ended = distflow_run(folder / "grpo.yaml", "rollout.n=2", workers=1, folder=tmp_path)
    assert ended.codes == [0], ended.err
    [step] = map(json.loads, (tmp_path / "runs" / "verifiers" / "metrics.jsonl").read_text().splitlines())
    assert step["env/environment/failures"] == 0
    assert step["env/environment/turns"] == 2
