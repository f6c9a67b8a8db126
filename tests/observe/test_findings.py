"""Warnings in words."""

from pathlib import Path
from typing import Any

from distflow.observe.explain import SENTENCES, explain
from distflow.observe.findings import findings, findings_over_time


def texts(*rows: dict[str, Any]) -> list[str]:
    return [f.text for f in findings([{"step": i + 1, **row} for i, row in enumerate(rows)])]


def test_a_run_that_is_well_has_no_warnings() -> None:
    row = {"reward/zero_std_frac": 0.2, "rollout/mismatch_kl": 1e-5, "actor/entropy": 0.5, "perf/slowest_rank": 0}
    assert texts(*[row | {"perf/straggle": 1.05, "reward/failures": 0.0, "data/imbalance": 0.01}] * 20) == []
    assert findings([]) == []


def test_what_is_wrong_is_said_in_words() -> None:
    slow = [{"perf/slowest_rank": 3 if i % 5 else 0, "perf/straggle": 1.5} for i in range(50)]
    assert texts(*slow) == ["rank 3 is the slowest in 40 of 50 steps, 1.5 times the mean"]
    assert texts(*[{"reward/zero_std_frac": 0.62}] * 30) == ["62% of groups had no signal in the last 10 steps"]
    assert texts({"rollout/mismatch_kl": 0.02}) == ["mismatch 0.02: the engine and the trainer disagree"]
    stale = {"rollout/mismatch_kl": 0.05, "rollout/staleness": 2.0}
    assert texts(stale) == []
    assert texts(stale | {"rollout/mismatch_kl": 0.2}) == [
        "mismatch 0.2: rollouts are by weights 2 steps older, which have moved far; lower rollout.staleness or train.lr"
    ]
    assert texts({"reward/failures": 2.0}, {"reward/failures": 1.0}) == [
        "the reward failed on 3 samples in the last 2 steps"
    ]
    assert texts({"reward/not_applicable": 3.0}) == [
        "no reward function applied to 3 samples in step 1, which have the score 0"
    ]
    assert texts({"response_length/clip_ratio": 0.4}) == [
        "40% of responses were cut off at rollout.max_tokens in step 1"
    ]
    assert texts({"actor/skipped_updates": 1.0}) == [
        "1 updates of the actor were skipped in step 1: gradients not finite"
    ]
    assert texts(*[{"actor/entropy": 1 / (i + 1)} for i in range(20)]) == [
        "the entropy of the policy fell from 1 to 0.05: it hardly explores any more"
    ]
    assert texts(*[{"data/imbalance": 0.5}] * 3) == ["tokens per worker differ by 50% in the last 3 steps"]
    assert texts(*[{"router/starved_frac": 0.25}] * 3) == [
        "25% of the experts starve: they get under a tenth of the mean load in the last 3 steps; raise"
        " train.router_aux_loss"
    ]
    scores = [0.1, 0.3, 0.5, 0.6, 0.62, 0.2]
    assert texts(*[{"val/all/score": s} for s in scores]) == ["val/all/score is 0.2, below its best of 0.62 in step 5"]
    assert texts(*[{"val/all/score": 0.0}] * 6) == []


def test_conversations_end_for_more_reasons_than_responses() -> None:
    row = {"response_length/clip_ratio": 0.4, "env/environment/turns": 3.0}
    assert texts(row) == [
        "40% of conversations were ended by environment.max_turns, turn_tokens or rollout.max_tokens in step 1"
    ]


def test_the_evaluation_before_training_is_no_step() -> None:
    rows = [{"step": 0, "val/all/score": 0.1}, {"step": 1, "reward/zero_std_frac": 0.8}]
    assert [f.text for f in findings(rows)] == ["80% of groups had no signal in step 1"]


def test_numbers_that_are_none_are_no_warnings() -> None:
    row = {"reward/zero_std_frac": None, "perf/slowest_rank": None, "actor/entropy": None, "val/a/score": None}
    assert texts(*[row] * 12) == []


def test_metrics_are_explained_by_the_first_pattern_that_fits() -> None:
    assert explain("reward/mean").startswith("Mean score of the responses")
    assert explain("timing_s/actor.generate").startswith("Mean seconds")
    assert explain("val/gsm8k/score") == "Mean score on held-out prompts: the number that counts."
    assert explain("mine") == ""


def test_the_docs_have_every_sentence() -> None:
    text = (Path(__file__).parents[2] / "docs" / "page.md").read_text()
    assert [p for p, sentence in SENTENCES.items() if f"| `{p}` | {sentence} |" not in text] == []


def test_a_problem_that_went_away_and_came_back_has_two_ranges() -> None:
    failing = {5, 6, 30}
    rows = [{"step": step, "reward/failures": float(step in failing)} for step in range(1, 41)]
    (warned,) = findings_over_time(rows)
    assert warned["ranges"] == [[5, 15], [30, 39]]  # a failure counts for ten steps
    assert warned["text"] == "the reward failed on 1 samples in the last 10 steps"
    assert findings_over_time([]) == []


def test_many_steps_cost_no_more_than_some() -> None:
    rows = [{"step": step, "reward/failures": 1.0} for step in range(1, 1001)]
    (warned,) = findings_over_time(rows, points=10)
    assert warned["ranges"] == [[100, 1000]]
