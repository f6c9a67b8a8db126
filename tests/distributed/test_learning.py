"""Runs that train and evaluate: what is learnt is exported, and a held-out set is scored."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from distflow import cli
from distflow.checkpoint.export import export
from distflow.config.schema import ModelConfig
from distflow.model.source import open_model
from distflow.observe.splits import HELD_OUT
from distflow.page.sample_index import SampleIndex
from distributed.test_gradients import exported
from warm import distflow_run

PAIRS = {"one and one is ": "two", "two and one is ": "three", "two and two is ": "four", "one and two is ": "thr33"}
REWARDS = """
import json
from pathlib import Path

def same(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def logged(solution_str, ground_truth):
    score = len(solution_str) % 4 / 3
    with open(Path(__file__).parent / "scores.jsonl", "a") as file:
        file.write(json.dumps([ground_truth, score]) + "\\n")
    return score

def unlogged(solution_str, ground_truth):
    return len(solution_str) % 4 / 3
"""
CONFIG: dict[str, Any] = {
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 8},
    "wait_limit_s": 60,
}


def run(
    folder: Path, name: str, *overrides: str, workers: int, resume: str | None = None, **config: Any
) -> list[dict[str, Any]]:
    """Runs a config to its end and returns the metrics of its steps."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run_dir": str(folder / name), **config}))
    ended = distflow_run(path, *overrides, workers=workers, resume=resume)
    assert ended.codes == [0] * workers, ended.err
    return read(folder / name / "metrics.jsonl")


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_learns_from_examples_and_the_exported_one_knows_them(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "pairs.jsonl", ({"prompt": p, "response": r, "answer": r} for p, r in PAIRS.items()))
    (tmp_path / "rewards.py").write_text(REWARDS)
    metrics = run(
        tmp_path,
        "sft",
        workers=2,
        flow="sft",
        data={"files": "pairs.jsonl", "batch": 4},
        steps=60,
        train={"lr": 1e-2, "warmup": 5, "dtype": dtype},
        reward="rewards.py:same",
        eval={"files": "pairs.jsonl", "every": 100},
    )
    assert [m["step"] for m in metrics] == [*range(61)]
    losses = [m["actor/loss"] for m in metrics[1:]]
    assert losses[0] > 4
    assert losses[-1] < 0.2
    assert [m["step"] for m in metrics if "val/all/score" in m] == [0, 60]
    assert metrics[0]["val/all/score"] == 0
    assert metrics[-1]["val/all/score"] == 1

    assert exported(tmp_path / "sft", tmp_path / "out") == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    for prompt, response in PAIRS.items():
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        response_tokens = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens.input_ids.shape[1] :]
        assert tokenizer.decode(response_tokens, skip_special_tokens=True) == response
        assert response_tokens[-1] == tokenizer.eos_token_id


GRPO: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "train.jsonl", "batch": 4},
    "steps": 5,
    "train": {"lr": 1e-2},
    "reward": "rewards.py:unlogged",
    "eval": {"files": "held_out.jsonl", "every": 2, "n": 3, "temperature": 1.0},
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one worker that evaluates five held-out rows, with three responses each."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "rewards.py").write_text(REWARDS)
    write(folder / "train.jsonl", ({"prompt": f"say {i}", "answer": "train"} for i in range(8)))
    kinds = ("even", "odd")
    held_out = ({"prompt": f"tell {i}", "answer": str(i), "data_source": kinds[i % 2]} for i in range(5))
    write(folder / "held_out.jsonl", held_out)
    run(folder, "alone", workers=1, **{**GRPO, "reward": "rewards.py:logged"})
    return folder


def evaluations(metrics: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    by_step = {m["step"]: {k: v for k, v in m.items() if k.startswith("val/")} for m in metrics}
    return {step: numbers for step, numbers in by_step.items() if numbers}


def test_a_held_out_set_is_evaluated_before_during_and_after_training(evaluated: Path) -> None:
    by_step = evaluations(read(evaluated / "alone" / "metrics.jsonl"))
    assert list(by_step) == [0, 2, 4, 5]
    scored = [(int(truth), score) for truth, score in read(evaluated / "scores.jsonl") if truth != "train"]
    assert len(scored) == 4 * 5 * 3
    for k, numbers in enumerate(by_step.values()):
        scores = [[s for truth, s in scored[15 * k : 15 * k + 15] if truth == row] for row in range(5)]
        assert [len(s) for s in scores] == [3] * 5
        for kind, rows in (("even", scores[::2]), ("odd", scores[1::2])):
            assert numbers[f"val/{kind}/score"] == pytest.approx(np.mean(rows))
            assert numbers[f"val/{kind}/pass@3"] == pytest.approx(np.mean([max(s) for s in rows]))
            two = [np.mean([max(a, b), max(a, c), max(b, c)]) for a, b, c in rows]
            assert numbers[f"val/{kind}/pass@2"] == pytest.approx(np.mean(two))
        assert numbers.keys() >= {"val/response_length/mean", "val/response_length/clip_ratio"}
    assert len({tuple(numbers.values()) for numbers in by_step.values()}) > 1  # the model changes


@pytest.mark.parametrize(
    ("workers", "placement"),
    [
        (2, {}),
        (2, {"default": {"tp": 2}}),
        (4, {"nodes": {"actor.generate": {"tp": 2}}}),
        (
            4,
            {"ranks": {"g": "0-1", "t": "2-"}, "default": {"ranks": "t"}, "nodes": {"actor.generate": {"ranks": "g"}}},
        ),
    ],
    ids=["dp2", "tp2", "dp4 generating tp2", "split"],
)
def test_every_held_out_row_counts_once_on_any_number_of_workers(
    evaluated: Path, workers: int, placement: dict[str, Any]
) -> None:
    """Five rows divide over no number of workers."""
    want = evaluations(read(evaluated / "alone" / "metrics.jsonl"))
    name = f"{workers} {'-'.join(placement)}"
    got = evaluations(run(evaluated, name, workers=workers, placement=placement, **GRPO))
    names = [f"val/{kind}/{what}" for kind in ("even", "odd") for what in ("score", "pass@2", "pass@3")]
    assert got.keys() == want.keys()
    for step, numbers in want.items():
        assert {n: got[step][n] for n in names} == pytest.approx({n: numbers[n] for n in names})
    samples = SampleIndex(evaluated / name).table()
    held_out = [i for i, split in enumerate(samples["split"]) if split == HELD_OUT]
    shown = {(samples["step"][i], samples["prompt"][i]) for i in held_out}
    assert shown == {(step, f"tell {i}") for step in want for i in range(5)}
    assert all(samples["score"][i] is not None and samples["response"][i] is not None for i in held_out)


def test_a_model_is_evaluated_without_training(evaluated: Path) -> None:
    """As `distflow eval` does it; the metrics are those before training."""
    before = evaluations(read(evaluated / "alone" / "metrics.jsonl"))[0]
    metrics = run(evaluated, "eval", "steps=0", workers=2, **GRPO)
    assert [m["step"] for m in metrics] == [0]
    numbers = evaluations(metrics)[0]
    for name in ("val/even/score", "val/odd/score", "val/even/pass@3"):
        assert numbers[name] == pytest.approx(before[name])
    assert not (evaluated / "eval" / "checkpoints").exists()


def evaluate_and_count(log: Path, words: list[str]) -> None:
    """Runs a worker that logs which files of the checkpoint it reads to verify them."""
    from distflow.checkpoint import store

    sha256 = store.sha256

    def logged(path: Path) -> str:
        with open(log, "a") as file:
            file.write(f"{path}".partition("/step_5/")[2] + "\n")
        return sha256(path)

    store.sha256 = logged
    cli.main(words)


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_is_evaluated_without_an_export(evaluated: Path, lora: bool) -> None:
    """As `distflow eval --checkpoint` does it: on another number of workers, each of which reads its own part."""
    config, trained = dict(GRPO), "alone"
    if lora:
        trained, config["train"] = "adapter", {"lr": 1e-2, "lora": {"rank": 2}}
        run(evaluated, trained, workers=1, **config)
    after = evaluations(read(evaluated / trained / "metrics.jsonl"))[5]
    name, hashed = f"{trained}-eval", evaluated / f"{trained}-hashed"
    words = ["placement.nodes={actor.generate: {tp: 2}}", "--checkpoint"]
    main = partial(evaluate_and_count, hashed)
    ended = distflow_run(evaluated / f"{trained}.yaml", *words, workers=2, command="eval", main=main)
    assert ended.codes == [0, 0], ended.err
    metrics = read(evaluated / name / "metrics.jsonl")
    files = json.loads((evaluated / trained / "checkpoints" / "step_5" / "complete.json").read_text())["files"]
    assert sorted(hashed.read_text().split()) == sorted(files)  # by all workers together, each once
    assert [m["step"] for m in metrics] == [5]
    for metric in ("val/even/score", "val/odd/score", "val/even/pass@3"):
        assert evaluations(metrics)[5][metric] == pytest.approx(after[metric])
    assert not (evaluated / name / "checkpoints").exists()


def test_eval_takes_a_checkpoint_or_the_newest_of_the_run(
    evaluated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def launch(config: Any, words: list[str], resume: str | None, again: list[str]) -> int:
        assert (config.steps, resume) == (0, None)
        seen.append(words)
        return 0

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("distflow.cluster.local.launch", launch)
    config, step = str(evaluated / "alone.yaml"), str(evaluated / "alone" / "checkpoints" / "step_5")
    for words in (["--checkpoint"], ["--checkpoint", "eval.n=1"], ["--checkpoint", step], []):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["eval", config, *words])
    run_dir = str(evaluated / "alone")
    assert [[w for w in words if "--checkpoint" in w] for words in seen] == [[f"--checkpoint={step}"]] * 3 + [[]]
    assert all(words[:2] == ["eval", config] and f"run_dir={run_dir}-eval" in words for words in seen)
    assert "eval.n=1" in seen[1]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["eval", config, "--checkpoint", str(evaluated / "nothing")])
    assert "nothing: there is no checkpoint here; name a run's folder" in capsys.readouterr().err


def test_an_export_has_the_dtype_of_the_model(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", ({"prompt": p, "response": r} for p, r in PAIRS.items()))
    given = ModelConfig(**CONFIG["model"])
    source = open_model(given, lambda: iter(()), tmp_path, 0)
    AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    source.tokenizer.save_pretrained(tmp_path / "half")
    data = {"files": "pairs.jsonl", "batch": len(PAIRS)}
    run(tmp_path, "sft", workers=1, flow="sft", steps=1, data=data, model="half", checkpoint={"export": True})
    assert exported(tmp_path / "sft", tmp_path / "own") == 0
    assert exported(tmp_path / "sft", tmp_path / "full", "--dtype", "float32") == 0
    beside = tmp_path / "sft" / "checkpoints" / "step_1" / "huggingface"
    for folder, dtype in (
        (tmp_path / "own", torch.bfloat16),
        (tmp_path / "full", torch.float32),
        (beside, torch.bfloat16),
    ):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert model.dtype == dtype
        assert not (folder / ".part").exists()
    assert exported(tmp_path / "sft", tmp_path / "ema", "--ema") == 2


def test_an_export_that_was_interrupted_is_not_taken_for_a_model(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerBase, "save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(evaluated / "alone", out)
    assert [p.name for p in out.iterdir()] == [".part"]
    export(evaluated / "alone", out)
    assert (out / "config.json").exists()
    assert not (out / ".part").exists()
