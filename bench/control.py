"""What control costs a worker when N grows: CPU, messages, bytes, connections and open files of a step, and start-up.

    python bench/control.py [--workers 8 16 32 64 128 256] [--steps 6] [--quick]

Real workers, forked, on hosts of 8 (network namespaces) where this user is root. Each step is a whole step of GRPO with
a tiny share of samples per worker: the weight sync from train dp N to generate dp N/2 × tp 2, moves with balance,
metrics, votes and a checkpoint. CPU time is a worker's own, so that two cores do for all of them. Then the weight sync
of real models at sizes that do not fit here, derived but not sent. The last line is one JSON object.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a fork of a process with threads may hang

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from steps import Work, run_steps
from weight_sync import MODELS, weight_sync_s
from workers import fork_workers

PER_HOST, WARM_UP, BASE = 8, 2, 32
WORK = Work(rows=8, tokens=16, hidden=64, layers=2)
COUNTS = ("cpu_ms", "messages", "kib", "connections", "open_files", "start_up_s", "start_up_cpu_s")
# Before: a full mesh per set of ranks, an all-gather of N − 1 messages, a weight sync in which all enumerate all.
BEFORE: dict[str, Callable[[int], float | None]] = {
    "sockets": lambda n: 8.5 * n,
    "metadata_ms": {8: 0.65, 32: 1.8, 128: 6.9, 256: 14.1}.get,
    "weight_sync_s": {8: 0.07, 16: 0.25, 32: 1.0, 64: 4.2, 128: 18.0, 1024: 3300.0}.get,
}


def measure(n: int, steps: int) -> dict[str, float]:
    """Returns the means over workers, of the median step after warm-up, and the most of what the system limits."""
    with tempfile.TemporaryDirectory() as folder:
        workers = fork_workers(n, PER_HOST, run_steps, WORK, WARM_UP + steps, folder)

    def spent(worker: dict[str, Any], name: str) -> float:
        values = [row[name] for row in worker["rows"][WARM_UP:]]
        return statistics.median(b - a for a, b in pairwise(values))

    def mean(values: Any) -> float:
        return round(statistics.mean(values), 3)

    return {
        "cpu_ms": mean(1e3 * spent(w, "cpu_s") for w in workers),
        "messages": mean(spent(w, "messages") for w in workers),
        "kib": mean(spent(w, "bytes") / 1024 for w in workers),
        "connections": mean(w["rows"][-1]["connections"] for w in workers),
        "most_connections": max(w["rows"][-1]["connections"] for w in workers),
        "open_files": mean(w["rows"][-1]["open_files"] for w in workers),
        "most_open_files": max(w["rows"][-1]["open_files"] for w in workers),  # rank 0, which keeps the store
        "start_up_s": round(max(w["start_up_s"] for w in workers), 3),
        "start_up_cpu_s": mean(w["start_up_cpu_s"] for w in workers),
    }


def growth(rows: dict[int, dict[str, float]], name: str) -> float | None:
    last = max(rows)
    return round(rows[last][name] / rows[BASE][name], 3) if BASE in rows and last > BASE else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="only 8, 32 and 64 workers, three steps")
    args = parser.parse_args()
    sizes, steps = ([8, 32, 64], 3) if args.quick else (args.workers, args.steps)
    print("per worker and step; before: sockets, ms of the metadata of one move, s of the weight sync of a 7B model")
    print("| workers | " + " | ".join((*COUNTS, *(f"before: {name}" for name in BEFORE))) + " |")
    print("| --- " * (1 + len(COUNTS) + len(BEFORE)) + "|")
    rows: dict[int, dict[str, float]] = {}
    for n in sizes:
        rows[n] = measure(n, steps)
        replicas = [rows[n][name] for name in COUNTS] + [of(n) for of in BEFORE.values()]
        print(f"| {n} | " + " | ".join("" if c is None else f"{c:.4g}" for c in replicas) + " |", flush=True)
    weight_sync = {name: {n: weight_sync_s(name, n) for n in (1024, 8192)} for name in MODELS}
    for name, times in weight_sync.items():
        print(f"weight sync of {name}, derived: " + ", ".join(f"{s} s at {n:,}" for n, s in times.items()))
    result = {
        "workers": rows,
        "connections_growth": growth(rows, "connections"),
        "step_growth": growth(rows, "cpu_ms"),
        "weight_sync_s": weight_sync,
        "start_up_s": {n: row["start_up_s"] for n, row in rows.items()},
        "before": {name: {n: of(n) for n in (*sizes, 1024) if of(n)} for name, of in BEFORE.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
