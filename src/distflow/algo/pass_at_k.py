"""pass@k: the expected score of the best of k responses."""

from collections.abc import Sequence


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Returns the expected maximum of k scores drawn from these without replacement.

    For scores of 0 and 1 it is the unbiased estimate of pass@k (arXiv 2107.03374).
    """
    n = len(scores)
    total, share = 0.0, k / n  # the share of choices of k scores whose maximum is the i-th lowest
    for i, score in zip(range(n, k - 1, -1), sorted(scores, reverse=True), strict=False):
        total += share * score
        share *= (i - k) / max(1, i - 1)
    return total


def reported_ks(n: int) -> list[int]:
    """Returns the k to report for n responses: 2, 4, 8, … and n."""
    return sorted({*(1 << i for i in range(1, n.bit_length())), n} - {1})
