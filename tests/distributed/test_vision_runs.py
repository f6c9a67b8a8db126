"""Runs with images: the same on every layout, exact resume, frozen towers, adapters, and models that load elsewhere."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from distflow.checkpoint.export import export
from distflow.checkpoint.store import load_full_tensors
from distflow.weights.state import WEIGHTS
from vision import png
from warm import Ended, distflow_run

STEPS = 4
CURVES = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "response_length/mean")
SMALL = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "vision": {"hidden": 32, "layers": 2, "patch": 4, "size": 16},
}
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "train.parquet", "batch": 4},
    "steps": STEPS,
    "model": {"arch": "qwen2_5_vl", **SMALL},
    "rollout": {"n": 4, "max_tokens": 8, "verify_every": 1},
    "train": {"lr": 1e-3, "micro_tokens": 128},
    "algo": {"kl": 0.01},
    "reward": "reward.py:letters",
    "wait_limit_s": 60,
}
SPLIT = {"ranks": {"rollout": "0", "train": "1"}, "default": {"ranks": "train"},
         "nodes": {"actor.generate": {"ranks": "rollout"}}}  # fmt: skip
TP = {"roles": {role: {"tp": 2} for role in ("actor", "reference")}}
QUESTIONS = ("<image>Is it red?", "Are <image> and <image> alike?", "No picture. Why?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    rows = []
    for i in range(12):
        question = QUESTIONS[i % 3]
        images = [{"bytes": png((8 + 4 * (i % 3), 16), 10 * i + k)} for k in range(question.count("<image>"))]
        rows.append({"prompt": [{"role": "user", "content": question}], "images": images})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def letters(solution_str):\n    return sum(map(str.isalpha, solution_str)) / 8\n"
    )
    return folder


def run(folder: Path, name: str, workers: int = 1, resume: str | None = None, **changes: Any) -> Ended:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / name)} | changes))
    ended = distflow_run(path, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    return ended


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["rollout/mismatch_max"] < 1e-3, "engine and trainer compute the same"
    return lines


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, float]]:
    run(folder, "alone", train={"lr": 1e-3})
    return metrics(folder, "alone")


@pytest.mark.parametrize(
    ("name", "workers", "changes"),
    [("dp2", 2, {}), ("tp2", 2, {"placement": TP}), ("split", 2, {"placement": SPLIT}), ("more-than-prompts", 3, {})],
)
def test_every_layout_has_the_same_curves(
    folder: Path, alone: list[dict[str, float]], name: str, workers: int, changes: dict[str, Any]
) -> None:
    run(folder, name, workers, **changes)
    for ours, theirs in zip(metrics(folder, name), alone, strict=True):
        for curve in CURVES:
            assert ours[curve] == pytest.approx(theirs[curve], rel=2e-3, abs=1e-6), (curve, ours["step"])


def test_a_resumed_run_goes_on_as_if_nothing_had_been(folder: Path, alone: list[dict[str, float]]) -> None:
    run(folder, "resumed", steps=2)
    run(folder, "resumed", 2, resume="auto")
    for ours, theirs in zip(metrics(folder, "resumed"), alone, strict=True):
        assert all(ours[c] == pytest.approx(theirs[c], rel=2e-3, abs=1e-6) for c in CURVES)


@pytest.mark.parametrize("arch", ["idefics3", "qwen3_vl"])
def test_another_family_trains_and_what_is_exported_loads_in_transformers(folder: Path, arch: str) -> None:
    run(folder, arch, model={"arch": arch, **SMALL}, train={"lr": 1e-3, "freeze": "vision"}, steps=1)
    metrics(folder, arch)
    out = export(folder / arch, folder / f"{arch}-model")
    loaded = AutoModelForImageTextToText.from_pretrained(out)
    trained = load_full_tensors(folder / arch / "checkpoints" / "step_1" / "actor", WEIGHTS)
    for name, p in loaded.named_parameters():
        torch.testing.assert_close(p.data, trained[name], atol=0, rtol=0)
    assert AutoImageProcessor.from_pretrained(out, backend="pil").patch_size if arch == "qwen3_vl" else True
    assert AutoTokenizer.from_pretrained(out).chat_template
    run(folder, f"{arch}-again", model={"path": str(out)}, steps=1)


def test_a_frozen_tower_stays_as_it_was_and_the_rest_does_not(folder: Path) -> None:
    run(folder, "frozen", 2, train={"lr": 1e-3, "freeze": ["vision"]}, steps=1)
    run(folder, "start", steps=1, train={"lr": 0.0})
    after, before = (
        load_full_tensors(folder / name / "checkpoints" / "step_1" / "actor", WEIGHTS) for name in ("frozen", "start")
    )
    for name, weight in before.items():
        assert ("visual" in name) == torch.equal(weight, after[name]), name


def test_an_adapter_is_of_the_language_model(folder: Path) -> None:
    pytest.importorskip("peft")
    run(folder, "lora", train={"lr": 1e-3, "lora": {"rank": 2}}, steps=2)
    metrics(folder, "lora")
    names = load_full_tensors(folder / "lora" / "checkpoints" / "step_2" / "actor", WEIGHTS)
    assert names
    assert all("language_model" in name for name in names)
