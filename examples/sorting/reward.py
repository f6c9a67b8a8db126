"""Scores 1 for the digits in order, else 0; or, as a part of it, 1 for the right digits in any order."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)


def same_digits(data_source, solution_str, ground_truth, extra_info=None):
    return float(sorted(solution_str.strip()) == list(ground_truth))
