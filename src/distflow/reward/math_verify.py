"""Mathematical answers, checked by math-verify: `call: distflow.reward.math_verify:score`."""

import importlib
from typing import Any

from distflow.reward.errors import RewardError

try:
    _verifier: Any = importlib.import_module("math_verify")
except ImportError as e:
    raise RewardError(f"math-verify is not installed ({e}); pip install 'distflow-rl[math]'") from e


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 if the last answer in the response (boxed, in LaTeX, or a plain number) equals the ground truth, else 0.

    The ground truth is LaTeX with or without its `$`, a number, or a solution that ends in `#### answer`.
    """
    gold = _parse_truth(str(ground_truth))
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} holds no mathematical expression")
    return float(_verifier.verify(gold, _verifier.parse(solution_str)))


def _parse_truth(text: str) -> Any:
    text = text.rpartition("####")[2].strip()
    if not any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
        text = f"${text}$"  # without a mark only numbers are found
    return _verifier.parse(text)
