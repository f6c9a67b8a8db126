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
from distflow.page.sample_index import SampleIndex
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


PPO: dict[str, Any] = {"flow": "ppo", "critic": {"lr": 1e-3}}
PPO_TP = {"roles": {role: {"tp": 2} for role in ("actor", "critic", "reference")}}


@pytest.fixture(scope="module")
def critic_alone(folder: Path) -> list[dict[str, float]]:
    run(folder, "ppo-alone", **PPO)
    return metrics(folder, "ppo-alone")


@pytest.mark.parametrize(("name", "placement"), [("dp2", {}), ("tp2", PPO_TP), ("split", SPLIT)])
def test_a_critic_sees_the_same_on_every_layout(
    folder: Path, critic_alone: list[dict[str, float]], name: str, placement: dict[str, Any]
) -> None:
    run(folder, f"ppo-{name}", 2, **PPO, placement=placement)
    for ours, theirs in zip(metrics(folder, f"ppo-{name}"), critic_alone, strict=True):
        for curve in (*CURVES, "critic/loss", "critic/grad_norm"):
            assert ours[curve] == pytest.approx(theirs[curve], rel=2e-3, abs=1e-6), (curve, ours["step"])


ENVIRONMENT = """
from PIL import Image


class Screen:
    # Shows a screen whose colour follows from the row and the turn.

    def __init__(self, env_config=None, extras=None):
        self.row, self.turns = extras, 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        screen = Image.new("RGB", (16, 8 + 8 * (self.turns % 2)), (40 * self.turns, 90, 11 * self.row["turns"]))
        said = [{"role": "user", "content": [{"type": "image", "image": screen}, {"type": "text", "text": " Now?"}]}]
        reward = sum(map(str.isalpha, action)) / 8
        return {"observations": said, "reward": reward, "done": self.turns > self.row["turns"], "metadata": {}}

    def close(self):
        pass
"""
SCREEN: dict[str, Any] = {
    "environment": {"call": "screen.py:Screen", "turn_tokens": 5},
    "data": {"files": "turns.parquet", "batch": 4},
    "rollout": {"n": 4, "max_tokens": 60, "verify_every": 1},
    "reward": None,
}
SCREEN_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": TP,
    "split": SPLIT | {"nodes": {"actor.generate": {"ranks": "rollout"}, "reward.score": {"ranks": "rollout"}}},
}


@pytest.fixture(scope="module")
def screen_alone(folder: Path) -> list[dict[str, float]]:
    (folder / "screen.py").write_text(ENVIRONMENT)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([r | {"turns": i % 3} for i, r in enumerate(rows)]), folder / "turns.parquet")
    run(folder, "screen-alone", **SCREEN)
    return metrics(folder, "screen-alone")


@pytest.mark.parametrize("name", SCREEN_LAYOUTS)
def test_what_an_environment_shows_is_seen_on_every_layout(
    folder: Path, screen_alone: list[dict[str, float]], name: str
) -> None:
    run(folder, f"screen-{name}", 2, **SCREEN, placement=SCREEN_LAYOUTS[name])
    for ours, theirs in zip(metrics(folder, f"screen-{name}"), screen_alone, strict=True):
        for curve in (*CURVES, "env/environment/turns"):
            assert ours[curve] == pytest.approx(theirs[curve], rel=2e-3, abs=1e-6), (curve, ours["step"])


@pytest.mark.usefixtures("screen_alone")
def test_samples_have_what_was_shown(folder: Path) -> None:
    index = SampleIndex(folder / "screen-alone")
    fields = [s["fields"] for key in index.recorded() if (s := index.sample(*key))]
    assert {len(f["response_images"]) for f in fields} == {0, 1, 2}
    for f in fields:
        every = [*f["prompt_images"], *f["response_images"]]
        assert all(url.startswith("data:image/png;base64,") for url in every)
        places = [p for m in f["conversation"] if isinstance(m["content"], list) for p in m["content"]]
        assert sum(p == {"type": "image"} for p in places) >= len(every)


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
