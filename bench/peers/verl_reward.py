# mypy: ignore-errors
"""The reward of bench/step.py with verl's signature; verl and siiRL load this file by its path."""

from grpo_steps import score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score(solution_str, ground_truth)
