"""docs/own-algorithm.md, word for word: its files, its commands in order, their output, and what the runs learn."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distflow import Batch
from distflow.flow.importing import load
from docs_page import blocks, done

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "own-algorithm.md"
EXAMPLE = ROOT / "examples" / "own"
LEARNED = (
    "reward/mean",
    "actor/loss",
    "actor/grad_norm",
    "own/distinct",
    "own/running_mean",
    "own/weight",
    "sampling/discarded",
)
Metrics = list[dict[str, float]]


def pattern(line: str) -> str:
    """Returns a line of the page as a pattern: numbers and column widths may differ, `…` is anything."""
    words = [re.escape(re.sub(r"\d[\d.]*", "0", w)) if w != "…" else ".*" for w in line.split()]
    return r"\s+".join(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executes the page from top to bottom."""
    folder = tmp_path_factory.mktemp("own")
    output = ""
    page = list(blocks(PAGE))
    for i, block in enumerate(page):
        if block.file:
            block.write(folder)
        elif block.kind == "sh":
            output = "" if page[i - 1].kind != "sh" else output
            output += "".join(done(folder, command).out for command in block.text.splitlines())
        elif not block.kind:
            plain = re.sub(r"\d[\d.]*", "0", output)
            for line in block.text.splitlines():
                assert re.search(rf"^\s*{pattern(line)}\s*$", plain, re.M), f"missing:\n{line}\nin:\n{output}"
    return folder


def metrics(folder: Path, name: str) -> Metrics:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_both_learn(folder: Path) -> None:
    for name in ("grpo", "own"):
        reward = [m["reward/mean"] for m in metrics(folder, name)]
        assert len(reward) == 12
        assert reward[0] < 0.1
        assert reward[-1] > 0.7


@pytest.mark.parametrize("name", ["placed", "own_list"])
def test_another_placement_and_a_listed_flow_give_the_same_curve(folder: Path, name: str) -> None:
    for actual, expected in zip(metrics(folder, name), metrics(folder, "own")[:6], strict=True):
        assert [actual[c] for c in LEARNED] == pytest.approx([expected[c] for c in LEARNED], rel=1e-3, abs=1e-6)


def test_a_sample_in_two_sequences_is_trained_as_in_one(folder: Path) -> None:
    halves = metrics(folder, "in_halves")
    for actual, expected in zip(halves, metrics(folder, "grpo")[:4], strict=True):
        for curve in ("reward/mean", "actor/loss", "actor/grad_norm", "response_length/mean"):
            assert actual[curve] == pytest.approx(expected[curve], rel=1e-3, abs=1e-6), curve


def test_the_filter_has_prompts_replaced(folder: Path) -> None:
    steps = metrics(folder, "own")
    assert {m["sampling/rounds"] for m in steps} >= {1, 4}
    assert sum(m["sampling/discarded"] for m in steps) > 8
    for m in steps:
        sampled = 8 + m["sampling/discarded"]
        assert sampled <= 8 * 4
        assert m["perf/tokens"] >= 0.8 * 8 * 8 * sampled  # nearly all responses have eight tokens
        assert (sampled == 8 * 4) or not m["sampling/filled"]


def test_the_judge_keeps_a_running_mean(folder: Path) -> None:
    steps = metrics(folder, "own")
    mean = [m["own/running_mean"] for m in steps]
    simple = [k for k, m in enumerate(steps) if k and m["sampling/rounds"] == 1]  # all prompts were trained on
    assert len(simple) > 3
    for k in simple:
        assert mean[k] == pytest.approx(mean[k - 1] + 0.2 * (steps[k]["reward/mean"] - mean[k - 1]), abs=1e-6)


def first(folder: Path, *overrides: str) -> dict[str, float]:
    """Returns the first step of a run with other constants, which has the same samples."""
    done(folder, "distflow run own.yaml", "steps=1", "name=other", *overrides)
    return metrics(folder, "other")[0]


def test_the_loss_is_linear_in_the_weight_of_negative_advantages(folder: Path) -> None:
    half, none, full = (
        metrics(folder, "own")[0],
        first(folder, "algo.negative_weight=0.0"),
        first(folder, "algo.negative_weight=1.0"),
    )
    assert half["reward/mean"] == none["reward/mean"] == full["reward/mean"]
    assert none["own/weight"] < full["own/weight"]
    for name in ("own/weight", "actor/loss"):
        assert half[name] == pytest.approx((none[name] + full[name]) / 2, rel=1e-4)


def test_an_advantage_can_be_called_outside_a_flow(folder: Path) -> None:
    advantage = load("own.py:advantage", "test", folder)
    columns: dict[str, Any] = {
        "score": torch.tensor([0.0, 1.0, 0.5, 0.5, 0.5]),
        "distinct": torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]),
        "bonus": torch.zeros(5),
    }

    class Nothing:
        class metrics:  # noqa: N801
            @staticmethod
            def log(*_: object) -> None: ...

    batch = Batch(np.arange(5), np.array([0, 0, 0, 1, 1]), columns)
    assert advantage(batch, Nothing, distinct_weight=0.5).tolist() == [-0.5, 0.5, 0.0, 0.5, 0.0]


def test_shared_options_are_options_of_the_flow(folder: Path) -> None:
    steps = metrics(folder, "options")
    assert len(steps) == 2
    assert steps[0]["own/weight"] == pytest.approx(metrics(folder, "own")[0]["own/weight"], rel=1e-4)
    for m in steps:
        assert m["actor/kl"] > 0  # after the first of four updates
        assert m["rollout/correction"] == pytest.approx(1.0, abs=1e-3)


def test_the_kl_weight_adapts_to_the_divergence(folder: Path) -> None:
    steps = metrics(folder, "adaptive_kl")
    weights, kl = [m["actor/kl_weight"] for m in steps], [m["actor/kl"] for m in steps]
    assert weights[0] == 0.1
    assert weights[1] < weights[0]  # in the first step the policy is the reference
    assert weights[2:] == sorted(weights[2:])
    assert weights[-1] > 2 * weights[1]
    assert kl[-1] < max(kl)


def test_the_example_has_the_files_of_the_page(folder: Path) -> None:
    for path in EXAMPLE.glob("*.*"):
        assert path.read_text() == (folder / path.name).read_text(), path.name
    assert {p.name for p in EXAMPLE.glob("*.py")} == {"data.py", "own.py", "reward.py"}
