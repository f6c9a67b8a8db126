"""Whether a model reads images is known when a run is planned: from its config.json, or with a clear error."""

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from distflow.config import model_shape
from distflow.config.model_shape import reads_images
from distflow.config.schema import ModelConfig
from distflow.errors import ConfigError
from distflow.run.program import Program

TEXT: dict[str, Any] = {"prompt": "How many?"}
PARTS: dict[str, Any] = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the addresses that are asked for; nobody answers."""
    urls: list[str] = []

    class Session:
        def get(self, url: str, **_: Any) -> Any:
            urls.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    model_shape._of_hub.cache_clear()
    return urls


def program(folder: Path, *rows: dict[str, Any], model: Any = "owner/model", **changes: Any) -> Program:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"flow": "grpo", "model": model, "reward": "reward.py:none", "data": {"files": "rows.jsonl"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config | changes))
    return Program.load(folder / "run.yaml")


@pytest.mark.parametrize(
    ("config", "answer"), [({"model_type": "qwen2"}, False), ({"model_type": "qwen2_5_vl", "vision_config": {}}, True)]
)
def test_a_directory_says_so_itself(tmp_path: Path, asked: list[str], config: dict[str, Any], answer: bool) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for row in (TEXT, TEXT | {"images": []}):
        assert program(tmp_path, row, model="model").reads_images is answer
    assert not asked


def test_images_of_a_text_model_are_an_error(tmp_path: Path) -> None:
    model = {"arch": "qwen2"}
    with pytest.raises(ConfigError, match=r"data: there is a column 'images', and the model reads none"):
        program(tmp_path, TEXT | {"images": []}, model=model).plan(2)
    renamed = {"files": "rows.jsonl", "rename": {"images": "pictures"}}
    program(tmp_path, TEXT | {"images": []}, model=model, data=renamed, eval="rows.jsonl").plan(2)
    program(tmp_path, TEXT | {"image": "ubuntu:24.04"}, model=model).plan(2)


@pytest.mark.parametrize("content", ["{", "[1", "7"])
def test_a_broken_config_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model: .*config\.json cannot be read: "):
        _ = program(tmp_path, TEXT, model="model").reads_images


def test_the_hub_is_not_asked_for_rows_of_text(tmp_path: Path, asked: list[str]) -> None:
    assert not program(tmp_path, TEXT).reads_images
    assert not program(tmp_path, {"prompt": [{"role": "user", "content": "How many?"}]}, eval="rows.jsonl").reads_images
    assert not program(tmp_path, TEXT | {"image": "a.png"}, model="Qwen/Qwen2.5-7B-Instruct").reads_images
    assert not asked


@pytest.mark.parametrize("row", [TEXT | {"images": ["a.png"]}, TEXT | {"image": "a.png"}, PARTS])
@pytest.mark.parametrize("place", ["data", "later", "eval"])
def test_where_there_may_be_images_a_hub_that_does_not_answer_is_an_error(
    tmp_path: Path, asked: list[str], row: dict[str, Any], place: str
) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps(row) + "\n")
    rows = {"data": [row], "later": [TEXT, row], "eval": [TEXT]}[place]
    changes = {"eval": {"files": "held_out.jsonl"}} if place == "eval" else {}
    with pytest.raises(ConfigError, match=r"whether 'owner/model' reads images cannot be known: .*not known"):
        program(tmp_path, *rows, **changes).plan(2)
    assert asked == ["https://huggingface.co/owner/model/resolve/main/config.json"] * 2


def test_environments_may_show_images(tmp_path: Path, asked: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be known"):
        _ = program(tmp_path, TEXT, environment="env.py:Env").reads_images
    assert asked


@pytest.mark.parametrize("name", ["./model", "runs/a/model", "/model"])
def test_a_directory_that_is_not_there_yet_can_be_planned(tmp_path: Path, asked: list[str], name: str) -> None:
    assert not program(tmp_path, PARTS, model=name).reads_images
    assert not asked


def test_a_directory_without_a_config_is_an_error(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be known: there is no .*config\.json"):
        _ = program(tmp_path, PARTS, model="model").reads_images
    assert not asked


def test_a_cached_model_is_not_asked_for(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "config.json"
    kept.write_text('{"vision_config": {}}')
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(kept))
    assert reads_images(ModelConfig(path="owner/model"), tmp_path, lambda: True)
    assert not asked
