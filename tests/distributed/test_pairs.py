"""Preference pairs: a reward model learns to prefer the chosen response, then scores; DPO trains on them directly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from distflow.checkpoint.export import export, export_adapter
from distflow.errors import ConfigError
from distflow.run.check import check
from distflow.run.program import Program
from warm import Ended, distflow_run

ROWS = [{"prompt": f"count to {i}:", "chosen": str(i) * (1 + i % 3), "rejected": "no" * (1 + i % 4)} for i in range(16)]
MODEL = {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2}
CONFIG: dict[str, Any] = {
    "data": {"files": "pairs.jsonl", "batch": 8},
    "steps": 8,
    "model": MODEL,
    "train": {"lr": 1e-2, "micro_tokens": 100},
    "wait_limit_s": 60,
}
FLOW = """
import json

from distflow import flow, node


@node(writes=())
def keep(batch, ctx):
    for i, row in enumerate(batch["response_tokens"]):
        line = [batch["prompt_tokens"][i].tolist() + row.tolist(), float(batch["score"][i])]
        with open(ctx.folder / f"scores.{ctx.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")


@flow
def scored(prompts, actor, reward):
    rollout = actor.generate(prompts["prompt"])
    keep(rollout, reward.score(prompts, rollout))
"""


def run(folder: Path, name: str, workers: int, **changes: Any) -> tuple[Path, Ended]:
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump(CONFIG | {"run_dir": str(run_dir)} | changes))
    return run_dir, distflow_run(path, workers=workers)


def curve(run_dir: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "flow.py").write_text(FLOW)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The run that trained a reward model, on two workers."""
    run_dir, ended = run(folder, "judge", 2, flow="reward_model")
    assert ended.codes == [0, 0], ended.err
    export(run_dir, folder / "reward-model")
    return run_dir


def test_a_reward_model_learns_to_prefer_the_chosen_response(trained: Path) -> None:
    loss, accuracy = curve(trained, "reward_model/loss"), curve(trained, "reward_model/accuracy")
    assert loss[0] == pytest.approx(0.6931, abs=1e-3)  # all scores start at 0
    assert loss[-1] < 0.1
    assert accuracy[-1] > 0.95


def test_it_is_the_same_on_one_worker_and_tensor_parallel(folder: Path, trained: Path) -> None:
    whole = {"lr": 1e-2, "micro_tokens": 10_000}
    for name, workers, changes in (
        ("judge-alone", 1, {"train": whole}),
        ("judge-tp", 2, {"placement": {"roles": {"reward_model": {"tp": 2}}}}),
    ):
        run_dir, ended = run(folder, name, workers, flow="reward_model", steps=4, **changes)
        assert ended.codes == [0] * workers, ended.err
        for metric in ("reward_model/loss", "reward_model/grad_norm"):
            assert curve(run_dir, metric) == pytest.approx(curve(trained, metric)[:4], rel=1e-3, abs=1e-6)


def test_it_is_a_sequence_classification_model_and_scores_as_one(folder: Path, trained: Path) -> None:
    """It scores the tokens of another run; the exported model gives the same scores."""
    placement = {"ranks": {"a": "0", "b": "1"}, "default": {"ranks": "a"}, "roles": {"reward": {"ranks": "b"}}}
    changes = {"flow": "flow.py:scored", "reward": {"model": "reward-model"}, "placement": placement, "steps": 1}
    changes["model"] = "reward-model"  # the same vocabulary
    run_dir, ended = run(folder, "scored", 2, **changes, rollout={"n": 2, "max_tokens": 12})
    assert ended.codes == [0, 0], ended.err
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward-model")
    assert model.config.num_labels == 1
    scores = [json.loads(x) for file in run_dir.glob("scores.*.jsonl") for x in file.read_text().splitlines()]
    assert len(scores) == 16
    for tokens, score in scores:
        with torch.no_grad():
            logits = model.score(model.model(torch.tensor([tokens])).last_hidden_state[0, -1])
        assert score == pytest.approx(float(logits), abs=1e-4)
    assert len({score for _, score in scores}) > 8


def test_a_model_without_a_value_head_is_no_reward_model(folder: Path) -> None:
    run_dir, ended = run(folder, "sft", 1, flow="reward_model", steps=1)
    assert ended.codes == [0], ended.err
    export(run_dir, folder / "head")
    state = folder / "head" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(state).items() if k != "score.weight"}, state, {"format": "pt"})
    _, ended = run(folder, "headless", 1, flow="flow.py:scored", model="head", reward={"model": "head"}, steps=1)
    assert ended.codes == [1]
    message = "role 'reward': 'head' is no reward model, it has no value head; train one with"
    assert message in ended.err
    with pytest.raises(ConfigError, match=message):
        list(check(Program.load(folder / "headless.yaml")))


def test_a_reward_model_with_another_vocabulary_is_refused(folder: Path, trained: Path) -> None:
    path = folder / "stranger.yaml"
    changes = {"flow": "flow.py:scored", "model": MODEL | {"vocab": 300}, "reward": {"model": "reward-model"}}
    path.write_text(yaml.safe_dump(CONFIG | changes))
    with pytest.raises(ConfigError, match="'reward-model' has another vocabulary than 'qwen2 with random weights'"):
        list(check(Program.load(path)))


def test_dpo_learns_the_preference_and_the_same_on_any_layout(folder: Path) -> None:
    runs = []
    for name, workers, placement in (
        ("dpo", 1, {}),
        ("dpo-dp2", 2, {}),
        ("dpo-tp2", 2, {"roles": {"actor": {"tp": 2}, "reference": {"tp": 2}}}),
    ):
        changes = {"flow": "dpo", "train": {"lr": 3e-3, "micro_tokens": 64}, "algo": {"beta": 0.5, "mini_batches": 2}}
        run_dir, ended = run(folder, name, workers, **changes, steps=4, placement=placement)
        assert ended.codes == [0] * workers, ended.err
        runs.append(run_dir)
    loss = curve(runs[0], "actor/loss")
    assert loss[-1] < loss[0]
    assert curve(runs[0], "actor/margin")[-1] > 0.5
    assert curve(runs[0], "actor/accuracy")[-1] > 0.9
    for other in runs[1:]:
        for metric in ("actor/loss", "actor/grad_norm", "actor/margin"):
            assert curve(other, metric) == pytest.approx(curve(runs[0], metric), rel=1e-3, abs=1e-6)


def test_an_adapter_or_a_role_that_does_not_exist_cannot_be_exported(folder: Path, trained: Path) -> None:
    with pytest.raises(ConfigError, match="'reward_model' was trained without an adapter; export it without --adapter"):
        export_adapter(trained, folder / "nothing")
    with pytest.raises(ConfigError, match="has no role 'critc'"):
        export(trained, folder / "nothing", role="critc")
