"""Runs with a model and input that cannot work: each ends by itself, with one message that says what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from warm import Ended, distflow_run
from warm_launch import Launch

REWARDS = """
import time

def fine(completions, prompts):
    return [len(c) / 10 for c in completions]

def refuses_seven(completions, prompts):
    if any("seven" in p for p in prompts):
        raise ValueError("not seven, please")
    return [1.0] * len(completions)

def hangs(solution_str):
    time.sleep(10_000)

def refuses_some(solution_str):
    if len(solution_str) % 2:
        raise ValueError("odd")
    return 1.0
"""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 4},
    "steps": 3,
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 2, "max_tokens": 6},
    "reward": "rewards.py:fine",
    "wait_limit_s": 60,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "rewards.py").write_text(REWARDS)
    for name, extra in (("data.jsonl", ""), ("long.jsonl", " and so on" * 9)):
        rows = [{"prompt": f"say {w}{extra * (w in ('three', 'eight'))}"} for w in WORDS]
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def config(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "run_dir": str(folder / name), **changes}))
    return path


def run(folder: Path, name: str, *overrides: str, workers: int = 2) -> Ended:
    return distflow_run(config(folder, name), *overrides, workers=workers)


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("overrides", "workers", "message"),
    [
        (
            ["data.files=long.jsonl", "data.max_prompt=40"],
            2,
            r"long.jsonl:[38]: the prompt has \d+ tokens.* is 40 .* skip`",
        ),
        (
            ["eval=long.jsonl", "data.max_prompt=40"],
            2,
            r"long.jsonl:[38]: the prompt has \d+ tokens, the longest allowed is 40",
        ),
        (["model=./missing"], 2, "model: there is no directory .*/missing"),
        (
            ["placement.roles.actor.tp=4"],
            4,
            "placement: tp 4 does not divide the model's num_key_value_heads, 2; use a tp",
        ),
        (
            ["rollout.kv_cache_gb=1e-6"],
            1,
            r"step 1, node 'actor.generate': rollout.kv_cache_gb: a sequence of \d+ tokens",
        ),
        (
            ["reward={functions: rewards.py:hangs, time_limit_s: 0.3}"],
            2,
            r"rank \d, step 1, node 'reward.score': sample \d: reward 'hangs' .* took longer than 0.3 s; raise",
        ),
        (
            ["algo.scale=stdd"],
            1,
            "algo.scale: 'stdd' is not one of std, mean, none; did you mean 'std'?",
        ),
        (
            ["algo.recompute_old_logprobs=true", "placement.nodes={actor.logprobs: {tp: 2}}"],
            2,
            "placement: actor.update on .*dp2, actor.logprobs on .*tp2 share one model; place them alike",
        ),
        (["steps=0"], 1, "steps: 0 only evaluates, and there is no `eval` section; add one, or give steps"),
    ],
)
def test_a_run_that_cannot_work_ends_with_an_error(
    folder: Path, overrides: list[str], workers: int, message: str
) -> None:
    ended = run(folder, "cannot", *overrides, workers=workers)
    assert 1 in ended.codes
    assert 0 not in ended.codes
    lines = [line for line in ended.err.splitlines() if line.startswith("distflow: ")]
    assert any(re.search(message, line) for line in lines), ended.err
    assert "Traceback" not in ended.err
    assert "  File" not in ended.err


def test_the_launcher_prints_an_error_once(folder: Path) -> None:
    """One of the two workers has the sample."""
    launch = Launch(config(folder, "once", workers=2, reward="rewards.py:refuses_seven"))
    assert launch.wait(120) == 1
    message = (
        r"distflow: rank [01], step \d, node 'reward.score': sample \d+: reward 'refuses_seven' "
        r"\(rewards.py:refuses_seven\) raised ValueError: not seven, please \(.*rewards.py:9\) \(and 3 more of the"
        r" same call\); fix the function, or set `reward.on_failure: 0.0` to give such samples that score\n"
        r"  prompt: .*\n  response: \".*\"\n"
    )
    assert re.fullmatch(message, launch.err), launch.err


def test_failures_of_a_reward_may_be_a_score(folder: Path) -> None:
    name = "some"
    ended = run(folder, name, "reward={functions: rewards.py:refuses_some, on_failure: -1}", "steps=2")
    assert ended.codes == [0, 0], ended.err
    steps = metrics(folder, name)
    failures = [m["reward/failures"] for m in steps]
    assert sum(failures) > 0
    for m in steps:
        assert m["reward/mean"] == pytest.approx((8 - 2 * m["reward/failures"]) / 8)
    log = (folder / name / "rewards.log").read_text()
    assert log.count("raised ValueError: odd") == sum(failures)


def test_prompts_that_are_too_long_are_left_out_on_any_number_of_workers(folder: Path) -> None:
    skip = ["data.files=long.jsonl", "data.max_prompt=40", "data.on_bad_row=skip", "steps="]
    runs = {}
    for workers in (1, 2):
        ended = run(folder, f"skip{workers}", *skip, workers=workers)
        assert ended.codes == [0] * workers, ended.err
        assert "skipped 2 bad rows\n" in ended.out
        runs[workers] = metrics(folder, f"skip{workers}")
        assert len(runs[workers]) == 2  # once through the ten rows that are left
    assert re.search(r"long.jsonl:3: the prompt has \d+ tokens", (folder / "skip1.0.out").read_text())
    for alone, both in zip(runs[1], runs[2], strict=True):
        for name in ("reward/mean", "response_length/mean", "actor/grad_norm"):
            assert both[name] == pytest.approx(alone[name], rel=1e-3)
