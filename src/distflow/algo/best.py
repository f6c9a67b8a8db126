"""How good the best of several responses is."""

from collections.abc import Sequence


def best_of(scores: Sequence[float], k: int) -> float:
    """The highest of k of these scores, in the mean over all ways to choose k.

    Of scores that are 0 or 1 it is pass@k, without the bias of trying just k (arXiv 2107.03374).
    """
    n = len(scores)
    total, share = 0.0, k / n  # of the choices, those in which the i-th lowest is the highest; of all, any is in k / n
    for i, score in zip(range(n, k - 1, -1), sorted(scores, reverse=True), strict=False):
        total += share * score
        share *= (i - k) / max(1, i - 1)
    return total


def widths(n: int) -> list[int]:
    """The k that are worth telling of n responses: 2, 4, 8, … and n."""
    return sorted({*(1 << i for i in range(1, n.bit_length())), n} - {1})
