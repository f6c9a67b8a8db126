"""Fewer samples than workers, or a number that does not divide: the run is the same as that of one worker."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from warm import distflow_run

ROWS = [
    {"prompt": f"{'so ' * (i % 3)}what is {i}?", "response": str(i), "chosen": f"it is {i}", "rejected": "no" * (i + 1)}
    for i in range(6)
]
CODE = """
from distflow import flow, node


def digits(solution_str):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def any_digit(completions, **kwargs):
    assert completions, "called for no samples"
    return [float(any(c in "123" for c in text)) for text in completions]


@node(writes="bonus")
def bonus(batch):
    return batch["score"].minimum(batch["score"].max())  # raises without samples


class Judge:
    @node(writes="score")
    def score(self, batch, ctx):
        import torch

        ctx.metrics.log("judge/mean", 1.0, len(batch))
        ctx.metrics.log("judge/calls", 1, reduce="sum")
        return torch.tensor([len(text) / 10 for text in batch["response"]])


@flow
def own(prompts, actor, judge):
    rollout = actor.generate(prompts)
    score = judge.score(rollout)
    actor.update(rollout["prompt_tokens", "response_tokens"], bonus(score), loss="code.py:loss")


def loss(tokens):
    from distflow import Loss

    return Loss(-tokens.logprobs * tokens["bonus"])
"""
PAIRS = ["prompt", "chosen", "rejected"]
FIELDS = {"sft": ["prompt", "response"], "dpo": PAIRS, "reward_model": PAIRS}
CONFIG: dict[str, Any] = {
    "model": {"arch": "qwen2", "hidden": 16, "layers": 1, "heads": 2},
    "rollout": {"n": 2, "max_tokens": 8},
    "train": {"lr": 1e-2},
    "reward": "code.py:digits",
    "steps": 2,
    "wait_limit_s": 60,
}
EVAL = {"files": "data.jsonl", "every": 2, "limit": 1, "n": 2, "temperature": 1.0}
LOSS = ("actor/loss", "actor/grad_norm")
RL = (*LOSS, "reward/mean", "reward/min", "reward/max", "response_length/mean", "response_length/max")
SPLIT = {"ranks": {"g": "0-1", "t": "2-"}, "default": {"ranks": "t"}, "nodes": {"actor.generate": {"ranks": "g"}}}
# Workers, prompts, changes of the config, curves.
CASES: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "grpo": (4, 1, {"algo": {"kl": 0.01}, "eval": EVAL}, (*RL, "actor/kl", "reward/std", "val/all/pass@2")),
    "ppo": (4, 1, {"critic": {"lr": 1e-2}}, (*RL, "critic/loss", "critic/explained_variance", "advantage/raw_mean")),
    "dapo": (4, 2, {"reward": "code.py:any_digit", "algo": {"max_gen_batches": 3}}, (*RL, "sampling/discarded")),
    "sft": (2, 1, {"reward": None}, LOSS),
    "dpo": (2, 1, {"reward": None}, LOSS),
}
SLOW: dict[str, tuple[int, int, dict[str, Any], tuple[str, ...]]] = {
    "grpo, 3 prompts": (2, 3, {"algo": {"mini_batches": 3}, "eval": EVAL | {"limit": 5}}, (*RL, "val/all/score")),
    "own": (
        2,
        1,
        {"flow": "code.py:own", "reward": None, "roles": {"judge": "code.py:Judge"}, "rollout": {"n": 1}},
        (*LOSS, "judge/mean"),
    ),
    "grpo, tp": (4, 1, {"placement": {"default": {"tp": 2}}, "rollout": {"n": 1, "max_tokens": 8}}, RL),
    "grpo, split": (5, 2, {"placement": SPLIT, "algo": {"kl": 0.01, "recompute_old_logprobs": True}}, RL),
    "reinforce_pp": (3, 1, {}, (*RL, "advantage/raw_mean")),
    "dapo, 3 prompts": (4, 3, {"reward": "code.py:any_digit", "algo": {"max_gen_batches": 2}}, RL),
    "reward_model": (3, 2, {"reward": None}, ("reward_model/loss", "reward_model/grad_norm")),
    "dpo, 3 pairs": (2, 3, {"reward": None, "train": {"lr": 1e-2, "micro_tokens": 40}}, LOSS),
}


def run(folder: Path, name: str, workers: int, prompts: int, changes: dict[str, Any]) -> list[dict[str, float]]:
    flow = name.partition(",")[0]
    data = {"files": "data.jsonl", "batch": prompts, "fields": FIELDS.get(flow, ["prompt"])}
    config = CONFIG | {"flow": flow, "data": data} | changes
    path = folder / f"{workers}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None} | {"run_dir": f"run{workers}"}))
    ended = distflow_run(path, workers=workers, folder=folder)
    assert ended.codes == [0] * workers, ended.err
    return [json.loads(line) for line in (folder / f"run{workers}" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_is_the_same_where_some_workers_have_fewer_samples_or_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "code.py").write_text(CODE)
    workers, prompts, changes, curves = (CASES | SLOW)[name]
    want = run(tmp_path, name, 1, prompts, changes | {"placement": {}})
    got = run(tmp_path, name, workers, prompts, changes)
    assert [m["step"] for m in got] == [m["step"] for m in want]
    for curve in curves:
        values = [m[curve] for m in want if curve in m]
        assert values, curve
        assert [m[curve] for m in got if curve in m] == pytest.approx(values, rel=1e-3, abs=1e-6), curve
    if name == "own":
        assert [m["judge/calls"] for m in got] == [workers] * 2  # a method is called for no samples, too
