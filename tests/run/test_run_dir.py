"""What rank 0 writes about a run into its folder."""

import json
import platform
from pathlib import Path

import pytest

from distflow import __version__
from distflow.config import load_config
from distflow.errors import ConfigError
from distflow.run.run_dir import describe_run, make_dir

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if p.parent.name != "clusters")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT / "examples")))
def test_the_resolved_config_is_the_config(path: Path, tmp_path: Path) -> None:
    config = load_config(path, [f"run_dir={tmp_path / 'run'}", "train.lr=3e-7", "steps=7"])
    describe_run(config)
    resolved = load_config(tmp_path / "run" / "config.yaml")
    assert resolved.model_dump() == config.model_dump()
    assert (resolved.train.lr, resolved.steps) == (3e-7, 7)
    assert f"relative to {path.parent}\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_versions_are_written(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{flow: sft, data: rows.jsonl}")
    describe_run(load_config(tmp_path / "run.yaml", [f"run_dir={tmp_path / 'run'}"]))
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert list(versions) == ["distflow", "torch", "transformers", "numpy", "python"]
    assert (versions["distflow"], versions["python"]) == (__version__, platform.python_version())


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^run_dir: .*/file/run cannot be created: Not a directory; choose another"):
        make_dir(tmp_path / "file" / "run")
