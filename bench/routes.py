"""Routing: how evenly a heavy-tailed batch is balanced, and how long 100,000 samples over 1024 workers take.

    python bench/routes.py

Lengths are lognormal; one sample in a hundred is twenty times the median. The last line is one JSON object.
"""

import json
import statistics
import time

import numpy as np

from distflow.comm.balance import imbalance
from distflow.comm.routes import assign_replicas, contiguous_replicas, route
from distflow.plan import Layout


def heavy_tailed(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    median = 400
    lengths = median * np.exp(rng.normal(0, 0.5, count))
    lengths[rng.random(count) < 0.01] = 20 * median
    return np.maximum(lengths, 1).astype(np.int64)


def one(workers: int, samples: int, seed: int) -> dict:
    layout, lengths = Layout(tuple(range(workers)), workers), heavy_tailed(samples, seed)
    old = contiguous_replicas(samples, workers)
    start = time.perf_counter()
    new = assign_replicas(old, layout, layout, lengths, 1, balance=True)
    route(0, layout, layout, old, new)
    seconds = time.perf_counter() - start
    counts = np.bincount(new, minlength=workers)
    return {
        "workers": workers,
        "samples": samples,
        "before": imbalance(old, lengths, workers),
        "after": imbalance(new, lengths, workers),
        "counts_differ_by": int(counts.max() - counts.min()),
        "moved_fraction": float((new != old).mean()),
        "s": seconds,
    }


def main() -> None:
    rows = [one(n, 64 * n, seed) for n in (2, 4, 8, 64, 1024) for seed in range(5)]
    for n in (2, 4, 8, 64, 1024):
        of_n = [r for r in rows if r["workers"] == n]
        worst, before = max(r["after"] for r in of_n), statistics.median(r["before"] for r in of_n)
        moved = statistics.median(r["moved_fraction"] for r in of_n)
        tokens = f"tokens differ by {before:.1%} before, {worst:.2%} after (worst of 5)"
        print(f"{n:5d} workers × 64: {tokens}; {moved:.1%} of samples move")
    big = [one(1024, 100_000, seed) for seed in range(5)]
    result = {
        "token_imbalance": round(max(r["after"] for r in rows), 5),
        "counts_differ_by": max(r["counts_differ_by"] for r in rows),
        "route_s": round(statistics.median(r["s"] for r in big), 4),
        "route_imbalance_100k": round(max(r["after"] for r in big), 5),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
