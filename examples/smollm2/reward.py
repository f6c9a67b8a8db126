"""Scores 1 if the last number in the response is the right one, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.findall(r"\d+", solution_str)[-1:] == [ground_truth])
