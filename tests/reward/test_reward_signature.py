"""Signatures are read from parameter names, and return values are checked."""

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from distflow.reward.errors import RewardError
from distflow.reward.signature import NoScore, Score, Signature, parse_results, parse_signature

VERL = Signature("verl", ("solution_str",), ("solution_str",), False)
TRL = Signature("trl", ("completions",), ("completions",), False)


def test_parameter_names_tell_verl_from_trl() -> None:
    def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
    def trl(completions, solution, *, level, scale=1.0): ...

    assert parse_signature(verl, "here") == Signature(
        "verl",
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        ("data_source", "solution_str", "ground_truth"),
        True,
    )
    signature = parse_signature(trl, "here", ["level"])
    assert signature == Signature(
        "trl", ("completions", "solution", "level", "scale"), ("completions", "solution"), False
    )
    assert signature.required_columns == ("solution",)
    assert signature.accepts("scale")
    assert not signature.accepts("prompts")


def test_a_wrapped_function_is_seen_through() -> None:
    def inner(solution_str, ground_truth, scale): ...

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    assert parse_signature(functools.partial(inner, scale=2), "here").kind == "verl"
    assert parse_signature(outer, "here", ["scale"]).parameters == ("solution_str", "ground_truth", "scale")


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (
            lambda text, answer=2: 0,
            [],
            r"here: its parameters \(text, answer=2\) match neither compute_score.*TRL",
        ),
        (lambda **kwargs: 0, [], r"\(\*\*kwargs\) match neither"),
        (3, [], "here: is a int, not a function"),
        (
            lambda solution_str, tolerance: 0,
            [],
            "parameter 'tolerance' has no value; give it a default, or set it in `args`",
        ),
        (lambda solution_str, tolerance: 0, ["tolerence"], "no parameter 'tolerence'.*did you mean 'tolerance'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(fn: Callable[..., Any], args: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        parse_signature(fn, "here", args)


@pytest.mark.parametrize(
    "value", [1, True, 1.0, Fraction(1), np.float32(1), np.bool_(True), np.array(1), torch.tensor(1.0), {"score": 1}]
)
def test_any_number_is_a_score(value: Any) -> None:
    assert parse_results(VERL, value, 1) == [Score(1.0, {})]
    assert isinstance(parse_results(VERL, value, 1)[0].value, float)  # type: ignore[union-attr]


def test_further_numbers_are_kept_and_the_rest_of_a_dict_is_not() -> None:
    value = {"score": 0.5, "acc": True, "n": np.int64(3), "pred": "7", "nan": math.nan, "parts": [1]}
    assert parse_results(VERL, value, 1) == [Score(0.5, {"acc": 1.0, "n": 3.0})]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None (NoneType) as a score; return a number"),
        ("1.0", "returned '1.0' (str) as a score; return a number"),
        ([1.0], "returned [1.0] (list) as a score"),
        (np.ones(2), "(ndarray) as a score"),
        (1j, "returned 1j (complex) as a score"),
        (math.nan, "returned nan; return a finite score"),
        (-math.inf, "returned -inf; return a finite score"),
        (10**400, "returned inf; return a finite score"),
        (1e39, "returned 1e+39; return a finite score"),
        ({"acc": 1.0}, "returned a dict without 'score'; known: acc"),
        ({"score": None}, "returned None (NoneType) as a score"),
        ("x" * 100, f"returned '{'x' * 59}… (str) as a score"),
    ],
)
def test_a_value_that_is_no_score_is_a_failure(value: Any, message: str) -> None:
    (result,) = parse_results(VERL, value, 1)
    assert isinstance(result, NoScore)
    assert re.search(re.escape(message), result.reason), result.reason


def test_in_a_list_only_the_invalid_scores_fail() -> None:
    results = parse_results(TRL, [1, None, math.nan, "a"], 4)
    assert results[:2] == [Score(1.0, {}), Score(None, {})]
    assert all(isinstance(r, NoScore) for r in results[2:])
    assert parse_results(TRL, torch.tensor([1.0, 2.0]), 2) == [Score(1.0, {}), Score(2.0, {})]
    assert parse_results(TRL, (0.5,), 1) == [Score(0.5, {})]


def test_a_list_of_another_length_fails_for_all() -> None:
    for value, message in (
        ([1.0], "returned 1 scores for 2 samples"),
        (1.0, "returned 1.0 (float); return a list"),
        (np.float64(1.0), "returned 1.0 (float); return a list"),
        (None, "returned None (NoneType); return a list"),
        ({"score": [1, 2]}, "(dict); return a list"),
    ):
        results = parse_results(TRL, value, 2)
        assert len(results) == 2
        assert all(isinstance(r, NoScore) and message in r.reason for r in results), results
