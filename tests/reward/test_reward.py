"""The reward role: users' functions unmodified, weights, metrics, and failures."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distflow import Batch, Ragged, flow
from distflow.errors import DistflowError
from distflow.reward.errors import RewardError
from distflow.reward.function import RewardSpec
from distflow.reward.reward import Reward
from reward.helpers import FILE, HERE, batch_of, context, metrics_of, rewarding, score, totals_of


def test_a_verl_function_by_file_and_by_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    batch = batch_of(["4", " 4 ", "5"], ground_truth=["4"] * 3)
    for ref in (f"{FILE}:compute_score", f"{HERE / FILE}:compute_score", "user_rewards:compute_score"):
        with rewarding({"call": ref}) as reward:
            assert score(reward, batch) == [1.0, 1.0, 0.0]


def test_where_verl_arguments_come_from() -> None:
    truths: list[tuple[dict[str, Any], str | None]] = [
        ({"reward_model": [{"ground_truth": "the truth", "style": "rule"}], "answer": ["other"]}, None),
        ({"ground_truth": ["the truth"], "answer": ["other"]}, None),
        ({"answer": ["the truth"], "solution": ["other"]}, None),
        ({"solution": ["the truth"], "label": ["other"]}, None),
        ({"label": ["the truth"]}, None),
        ({"label": ["other"], "final": ["the truth"]}, "final"),
    ]
    with rewarding("echo") as reward:
        for columns, answer in truths:
            reward.answer = answer
            assert score(reward, batch_of(["7"], **columns)) == [7.0], columns
        reward.answer = None
        info = [{"source": "gsm8k", "truth": 3}, {"source": "", "truth": 4}]
        batch = batch_of(["1", "2"], data_source=["gsm8k", None], extra_info=info, answer=torch.tensor([3, 4]))
        assert score(reward, batch) == [1.0, 2.0]
        with pytest.raises(RewardError, match=r"reward 'echo' \(user_rewards.py:echo\): needs a ground truth"):
            score(reward, batch_of(["1"]))
        with pytest.raises(RewardError, match=r"sample 101: its 'reward_model' holds no 'ground_truth'"):
            score(reward, batch_of(["1", "2"], reward_model=[{"ground_truth": "the truth"}, {}]))


def test_a_trl_function_gets_columns_by_name() -> None:
    with rewarding("exact") as reward:
        assert score(reward, batch_of(["a", "b"], solution=["a", "a"], more=[1, 2])) == [1.0, 0.0]
        with pytest.raises(RewardError, match="needs column 'solution', which the data lacks; did you mean 'solutoin'"):
            score(reward, batch_of(["a"], solutoin=["a"]))


def test_a_trl_function_gets_messages_where_the_prompt_is_a_chat() -> None:
    chat = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]] * 2
    with rewarding("chat") as reward:
        assert score(reward, batch_of(["abc", ""], prompt=chat)) == [3.0, 0.0]


def test_async_functions_share_one_event_loop() -> None:
    with rewarding("with_client", "later") as reward:
        for _ in range(2):
            batch = batch_of(["abc", "a"], level=torch.tensor([1, 2]), ground_truth=["abc", "b"])
            assert score(reward, batch) == [3 + 1 + 1.0, 1 + 2 + 0.0]
        without = {n: c for n, c in batch.columns.items() if n != "response_tokens"}
        with pytest.raises(RewardError, match="needs completion_ids, but the batch lacks 'response_tokens'"):
            score(reward, Batch(batch.ids, batch.groups, without))


def test_a_trl_function_with_kwargs_gets_all_columns() -> None:
    per_token = Ragged.of([torch.ones(1)])  # not a column of the data set
    # prompts, completion_ids, a and b; trainer_state, log_metric and log_extra
    with rewarding("count_columns") as reward:
        assert score(reward, batch_of(["x"], a=[1], b=torch.ones(1), logprobs=per_token)) == [7.0]
    with rewarding("confident") as reward:
        assert score(reward, batch_of(["x"], a=[1], logprobs=per_token)) == [1.0]


def test_an_object_may_be_the_function() -> None:
    with rewarding("constant") as reward:
        assert score(reward, batch_of(["x"], answer=["y"])) == [0.5]


def test_several_rewards_add_up_by_weight_and_are_logged_apart() -> None:
    functions = [
        RewardSpec(f"{FILE}:detailed", weight=2.0, name="math", args={"bonus": 0.25}),
        RewardSpec(f"{FILE}:only_some"),
    ]
    batch = batch_of(["a", "skip", "b"], answer=["a", "skip", "a"], data_source=["x", "y", "math"])
    reward = Reward(functions, base=HERE)
    ctx = context()
    assert score(reward, batch, ctx) == [2.0, 2.5, 0.0]
    reward.close()
    assert metrics_of(ctx) == {
        "reward/mean": 1.5,
        "reward/min": 0.0,
        "reward/max": 2.5,
        "reward/math/mean": pytest.approx(2.75 / 3),
        "reward/math/acc/mean": pytest.approx(2 / 3),
        "reward/math/length/mean": 2.0,
        "reward/only_some/mean": -0.5,  # of the two it applies to
        "reward/x/mean": 2.0,
        "reward/y/mean": 2.5,
        "reward/source/math/mean": 0.0,
        "reward/failures": 0.0,
        "reward/restarts": 0.0,
    }
    assert totals_of(ctx)["reward/mean", "mean"] == (4.5, 3)


def test_a_trl_function_gets_the_state_and_logs() -> None:
    ctx = context()
    with rewarding("logs") as reward:
        assert score(reward, batch_of(["7", "a"]), ctx) == pytest.approx([0.2, 0.2])  # updates before step 3
        assert metrics_of(ctx)["reward/digits/mean"] == 0.5  # the mean of 1 and 0
    columns = ctx.record.columns  # type: ignore[attr-defined]
    assert columns["upper"] == ["7", "A"]
    assert columns["object"][0].startswith("<module 'os'")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logs_text", r"raised TypeError: log_metric\('digits', 'many'\): the value is not a number"),
        ("logs_too_few", r"raised ValueError: log_extra\('upper', …\): has 0 values for 1 samples"),
    ],
)
def test_a_log_that_cannot_be_kept_is_a_failure(name: str, message: str) -> None:
    with rewarding(name) as reward, pytest.raises(RewardError, match=message):
        score(reward, batch_of(["x"]))


def test_held_out_numbers_are_logged_by_source() -> None:
    batch = batch_of(["a", "b", "cd"], answer=["a", "a", "cd"], data_source=["x", "x", "y"])
    ctx = context(held_out=True)
    with rewarding("detailed") as reward:
        score(reward, batch, ctx)
    held_out = {n: v for n, v in metrics_of(ctx).items() if n.startswith("val/")}
    assert held_out == {"val/x/acc": 0.5, "val/y/acc": 1.0, "val/x/length": 1.0, "val/y/length": 2.0}
    ctx = context(held_out=True)
    with rewarding("detailed", "only_some") as reward:
        score(reward, batch_of(["a", "skip"], answer=["a", "a"]), ctx)
    held_out = {n: v for n, v in metrics_of(ctx).items() if n.startswith("val/")}
    assert held_out["val/all/only_some"] == -0.5
    assert held_out["val/all/detailed/acc"] == held_out["val/all/detailed"] == 0.5


def test_a_sample_to_which_no_reward_applies_is_counted() -> None:
    ctx = context()
    with rewarding("never_applies", "only_some") as reward:
        for _ in range(2):
            assert score(reward, batch_of(["skip", "a", "skip"]), ctx) == [0.0, -0.5, 0.0]
    assert metrics_of(ctx)["reward/not_applicable"] == 4


def test_missing_columns_are_found_without_samples() -> None:
    with rewarding("exact", "compute_score") as reward:
        fields = ["prompt", "response", "response_tokens", "solution"]
        reward.check_fields(fields)
        with pytest.raises(
            RewardError, match=r"^eval: reward 'exact' .*: needs column 'solution', which the data lacks"
        ):
            reward.check_fields(fields[:-1], "eval: ")


def test_further_numbers_of_a_single_function_need_no_prefix() -> None:
    ctx = context()
    with rewarding("detailed") as reward:
        assert score(reward, batch_of(["a", "b"], answer=["a", "a"]), ctx) == [1.0, 0.0]
    names = {n for n, _ in totals_of(ctx)}
    assert names == {f"reward/{n}" for n in ("mean", "min", "max", "acc/mean", "length/mean", "failures", "restarts")}


def test_an_empty_batch_has_no_scores() -> None:
    with rewarding("exact", "compute_score") as reward:
        assert score(reward, batch_of(["a"], solution=["a"]).select(np.arange(0))) == []


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("raise", r"raised ValueError: no number in the response \(.*user_rewards.py:\d+\)"),
        ("hang", "took longer than 1 s; raise `reward.time_limit_s` if it needs more time"),
        ("exit", "ended its process in both attempts: it exited with 7"),
        ("return nan", "returned nan; return a finite score that fits in float32"),
        ("return text", r"returned '1.0' \(str\) as a score; return a number"),
        ("return dict", "returned a dict without 'score'; known: acc"),
    ],
)
def test_a_failure_stops_with_sample_function_and_way_out(behaviour: str, message: str) -> None:
    with rewarding("behave", time_limit_s=1.0) as reward:
        with pytest.raises(RewardError) as e:
            score(reward, batch_of(["fine", "fine", behaviour, "fine"], answer=[""] * 4))
        failure = r"sample 102: reward 'behave' \(user_rewards.py:behave\) " + message
        error, prompt, response = str(e.value).splitlines()
        assert re.fullmatch(failure + "; fix the function, or set `reward.on_failure: 0.0` to .*", error), error
        assert prompt == '  prompt: "question 2"'
        assert response == f'  response: "{behaviour}"'
        assert isinstance(e.value, DistflowError)
        assert score(reward, batch_of(["fine"], answer=[""])) == [1.0]  # the pool still works


def test_with_a_score_for_failures_exactly_the_failed_samples_get_it(tmp_path: Path) -> None:
    bad = ["raise", "hang", "crash", "return nan", "return none"]
    responses = [x for b in bad for x in (*["fine"] * 5, b)]
    ctx = context()
    log = tmp_path / "run" / "rewards.log"
    with rewarding("behave", processes=2, time_limit_s=1.0, on_failure=-3, log=log) as reward:
        scores = score(reward, batch_of(responses, answer=[""] * 30), ctx)
    assert scores == [-3.0 if r in bad else 1.0 for r in responses]
    assert metrics_of(ctx)["reward/failures"] == 5
    assert metrics_of(ctx)["reward/restarts"] == 3  # the time limit, and two deaths
    lines = [line for line in log.read_text().splitlines() if not line.startswith("  ")]
    assert [line.split(" (")[0] for line in lines] == [
        f"step 3: sample {100 + i}: reward 'behave'" for i, r in enumerate(responses) if r in bad
    ]
    assert "took longer than 1 s" in lines[1]


def test_a_trl_call_fails_for_all_its_samples_or_for_the_invalid_ones() -> None:
    with rewarding("slip") as reward:
        with pytest.raises(
            RewardError, match=r"sample 100: .* returned 1 scores for 3 samples.*\(and 2 more of the same"
        ):
            score(reward, batch_of(["few", "b", "c"]))
        with pytest.raises(RewardError, match=r"sample 101: .* returned nan"):
            score(reward, batch_of(["nan", "b", "c"]))
        reward.on_failure = 9.0
        assert score(reward, batch_of(["few", "b", "c"])) == [9.0] * 3
        assert score(reward, batch_of(["text", "b", "c"])) == [9.0] * 3
        assert score(reward, batch_of(["nan", "b", "c"])) == [1.0, 9.0, 2.0]
        assert score(reward, batch_of(["word", "b", "c"])) == [1.0, 9.0, 2.0]


def test_a_sample_that_one_of_several_functions_fails_on_gets_that_score_alone() -> None:
    ctx = context()
    with rewarding("call_raises", "compute_score", on_failure=0.5) as reward:
        assert score(reward, batch_of(["4", "5"], answer=["4", "4"]), ctx) == [0.5, 0.5]
    assert metrics_of(ctx)["reward/failures"] == 2
    assert metrics_of(ctx)["reward/compute_score/mean"] == 0.5
    assert "reward/call_raises/mean" not in metrics_of(ctx)


def test_one_sample_can_be_scored() -> None:
    with rewarding("compute_score", "exact", on_failure=0.0) as reward:
        row = {"prompt": "2 + 2", "solution": "4"}
        assert reward.score_one({**row, "response": "4"}) == 2.0
        assert reward.score_one({**row, "response": "5"}) == 0.0
        with pytest.raises(RewardError, match=r"sample row 7: .*raised AttributeError"):
            reward.score_one({**row, "response": None}, "row 7")
        with pytest.raises(RewardError, match="reads 'response', but the samples have no such field"):
            reward.score_one(row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": []}, "reward.functions is empty"),
        ({"functions": [{"cal": "a.py:f"}]}, r"reward.functions\[0\]: unknown key 'cal'; did you mean 'call'"),
        ({"functions": [{"weight": 1}]}, r"reward.functions\[0\]: has no `call`"),
        ({"functions": [{"call": "a.py:f", "weight": "1"}]}, "reward 'f': weight '1' is not a finite number"),
        ({"functions": [{"call": "a.py:f", "args": {"x": {1}}}]}, "reward 'f': args must be plain values"),
        ({"functions": [{"call": "a.py:f"}, {"call": "b.py:f"}]}, "two entries are named 'f'; set another `name`"),
        ({"processes": 0}, "reward.processes is 0; set it to 1 or more"),
        ({"time_limit_s": 0}, "reward.time_limit_s is 0; set it to a number"),
        ({"on_failure": "ignore"}, "reward.on_failure is 'ignore'; set it to 'error' or to a finite score"),
        ({"on_failure": float("nan")}, "reward.on_failure is nan; set it"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Reward(**{"functions": [{"call": f"{FILE}:exact"}], **options})


def test_missing_and_unknown_args_are_refused() -> None:
    for function, message in (
        ({"call": f"{FILE}:needy"}, "parameter 'threshold' has no value; give it a default, or set it in `args`"),
        ({"call": f"{FILE}:needy", "args": {"treshold": 1}}, "has no parameter 'treshold'.*did you mean 'threshold'"),
    ):
        with rewarding(function) as reward, pytest.raises(RewardError, match=message):
            score(reward, batch_of(["a"], answer=["a"]))
    with rewarding({"call": f"{FILE}:needy", "args": {"threshold": 2}}) as reward:
        assert score(reward, batch_of(["a"], answer=["a"])) == [2.0]


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [("math_verify", "math-verify", "math"), ("reasoning_gym", "reasoning-gym", "gym")],
)
def test_an_adapter_says_what_to_install(
    adapter: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"distflow.reward.{adapter}", raising=False)
    with pytest.raises(RewardError, match=rf"{package} is not installed .*pip install -e '\.\[{extra}\]'"):
        importlib.import_module(f"distflow.reward.{adapter}")


def test_it_is_a_node_of_a_flow() -> None:
    @flow
    def rewarded(data: Any, reward: Any) -> None:
        reward.score(data)

    (node,) = rewarded.trace(("prompt", "response", "answer"), {"reward": Reward}).nodes
    assert (node.id, node.role, node.type, node.method) == ("reward.score", "reward", "inference", True)
    assert (node.reads, node.writes) == (("prompt", "response", "answer"), ("score",))


def test_a_sample_that_fails_in_several_functions_is_one_failure() -> None:
    """`reward/failures` counts samples; the log has every failure."""
    functions = [{"call": f"{FILE}:behave", "name": name} for name in ("one", "two", "three")]
    with rewarding(*functions, on_failure=-2.0) as reward:
        ctx = context()
        assert score(
            reward, batch_of(["fine", "raise", "raise", "fine"], data_source=[""] * 4, answer=[""] * 4), ctx
        ) == [
            3.0,
            -2.0,
            -2.0,
            3.0,
        ]
    assert metrics_of(ctx)["reward/failures"] == 2
