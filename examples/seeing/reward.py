"""Scores 1 for the right colour, else 0."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
