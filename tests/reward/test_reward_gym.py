"""The adapter to reasoning-gym, which is optional."""

import json

import pytest

pytest.importorskip("reasoning_gym")

from distflow.reward.errors import RewardError
from distflow.reward.reasoning_gym import rows, score
from reward.helpers import batch_of, rewarding
from reward.helpers import score as scores


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "arc_agi", "leg_counting", "graph_color"])
def test_the_right_answer_scores_1_after_being_written_to_a_file(dataset: str) -> None:
    for row in map(json.loads, map(json.dumps, rows(dataset, 3, seed=5))):
        assert row.keys() == {"prompt", "answer", "data_source", "extra_info"}
        answer = row["answer"]
        if dataset == "graph_color":  # has many right answers; the metadata holds one
            answer = json.dumps(dict(row["extra_info"]["metadata"]["possible_answer"]["__pairs__"]))
        args = row["answer"], row["extra_info"]
        assert score(dataset, f"<think><answer>0</answer></think> <answer> {answer}\n</answer>", *args) == 1.0
        assert score(dataset, f" {answer}\n", *args) == 1.0
        assert score(dataset, "<answer>surely not</answer>", *args) < 0.1


def test_rows_follow_seed_and_options() -> None:
    assert list(rows("chain_sum", 3, 1)) == list(rows("chain_sum", 3, 1))
    assert list(rows("chain_sum", 3, 1)) != list(rows("chain_sum", 3, 2))
    assert all(r["prompt"].count("+") + r["prompt"].count(" - ") == 1 for r in rows("chain_sum", 5, 1, max_terms=2))


@pytest.mark.parametrize(
    ("name", "options"), [("no_such", {}), ("chain_sum", {"x": 1}), ("chain_sum", {"max_terms": 0})]
)
def test_an_unknown_dataset_or_option_is_named(name: str, options: dict[str, int]) -> None:
    with pytest.raises(RewardError, match=f"reasoning-gym cannot create dataset '{name}' with"):
        next(rows(name, 1, 1, **options))


def test_it_runs_as_a_reward() -> None:
    tasks = list(rows("chain_sum", 2, 0))
    columns = {name: [row[name] for row in tasks] for name in ("prompt", "answer", "data_source", "extra_info")}
    with rewarding({"call": "distflow.reward.reasoning_gym:score"}) as reward:
        assert scores(reward, batch_of([f"<answer>{tasks[0]['answer']}</answer>", "?"], **columns)) == [1.0, 0.0]
