"""Scores 1 if the last number in the response is the right one, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])


def exact(data_source, solution_str, ground_truth, extra_info=None):
    """Scores 1 for the answer and nothing else, but for case and a full stop; `said`: it is in the response at all."""
    said, answer = solution_str.strip().rstrip(".").lower(), ground_truth.lower()
    return {"score": float(said == answer), "said": float(answer in re.findall(r"[\w-]+", said))}


def partly(data_source, solution_str, ground_truth, extra_info=None):
    """Scores as `exact`, and 0.2 for a response in which the answer is."""
    scores = exact(data_source, solution_str, ground_truth)
    return max(scores["score"], 0.2 * scores["said"])
