"""The card of an export says where a model is from and how good it is; an export is uploaded to the hub."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from distflow.checkpoint.model_card import check_hub_name, push, write_card
from distflow.errors import ConfigError
from distflow.run_folder import checkpoint_dir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {"flow": "grpo", "name": "sums", "model": {"path": "Qwen/Qwen3-0.6B"}, "train": {"lr": 1e-6}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": step, "val/all/score": step / 10, "reward/mean": 0.1} for step in (0, 5, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "versions.json").write_text('{"distflow": "0.2.0"}')
    return tmp_path


def test_the_card_has_the_base_model_the_scores_and_the_config(run: Path, tmp_path: Path) -> None:
    write_card(tmp_path, run, checkpoint_dir(run, 5), "transformers")
    _, head, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == "Qwen/Qwen3-0.6B"
    assert "flow `grpo`, 5 steps" in text
    assert "| `val/all/score` | 0.5 |" in text
    assert yaml.safe_load(text.partition("~~~~yaml\n")[2].partition("~~~~")[0])["train"] == {"lr": 1e-6}


def test_a_run_folder_without_its_files_still_gets_a_card(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(": {")
    write_card(tmp_path, tmp_path, checkpoint_dir(tmp_path, 3), "peft")
    text = (tmp_path / "README.md").read_text()
    assert "library_name: peft" in text
    assert "3 steps" in text


class Hub:
    """The hub, as its client is used."""

    asked: ClassVar[list[tuple[Any, ...]]] = []
    refuses = False

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        if self.refuses:
            raise RuntimeError("401: no access.")
        self.asked.append(("create", name, private, exist_ok))

    def upload_folder(self, repo_id: str, folder_path: str) -> None:
        self.asked.append(("upload", repo_id, folder_path))


def test_an_export_is_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [])
    push(tmp_path, "us/sums", private=True)
    assert Hub.asked == [("create", "us/sums", True, True), ("upload", "us/sums", str(tmp_path))]
    monkeypatch.setattr(Hub, "refuses", True)
    with pytest.raises(ConfigError, match=r"does not take 'us/sums': .*401.*`hf upload us/sums .*` tries again"):
        push(tmp_path, "us/sums", private=False)


@pytest.mark.parametrize("name", ["sums", "us/sums/more", "us/su ms", ""])
def test_a_name_that_the_hub_cannot_have_is_refused_before_exporting(name: str) -> None:
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        check_hub_name(name)
