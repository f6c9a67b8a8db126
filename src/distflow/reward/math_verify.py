"""Scores mathematical answers with math-verify: `call: distflow.reward.math_verify:score`."""

import importlib
from typing import Any

from distflow.reward.errors import RewardError
from distflow.util.extras import how_to_install

try:
    _verifier: Any = importlib.import_module("math_verify")
except ImportError as e:
    raise RewardError(f"math-verify is not installed ({e}); {how_to_install('math')}") from e


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns 1 if the last answer in the response (boxed, LaTeX or a plain number) equals the ground truth, else 0.

    The ground truth is LaTeX with or without its `$`, a number, or a solution that ends in `#### answer`.
    """
    gold = _parse_ground_truth(str(ground_truth))
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} holds no mathematical expression; fix the row")
    return float(_verifier.verify(gold, _verifier.parse(solution_str)))


def _parse_ground_truth(text: str) -> Any:
    text = text.rpartition("####")[2].strip()
    if not any(delimiter in text for delimiter in ("$", r"\boxed", r"\(", r"\[")):
        text = f"${text}$"  # without delimiters math-verify finds numbers only
    return _verifier.parse(text)
