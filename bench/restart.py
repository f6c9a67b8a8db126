"""A thousand real workers on one machine: all join and run steps, one is killed, all notice, restart and go on.

    python bench/restart.py [--workers 1024] [--steps 10]

Workers are forks on hosts of 8 (network namespaces, so this needs root), fewer if memory does not suffice for all. A
step is that of bench/control.py: a tiny share of samples per worker, moves with balance, the weight sync, metrics,
votes and a checkpoint. Halfway, one worker is killed (SIGKILL) after a step. Nobody tells the others: each notices by
its connections and ends. Then all are started again, and go on from the newest checkpoint. Seconds are those of two
cores for all workers; CPU seconds, messages and connections are a worker's own. The last line is one JSON object.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a fork of a process with threads may hang

import argparse
import encodings.idna
import json
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.ctypeslib
import numpy.ma

from control import PER_HOST, WORK
from distflow.checkpoint.store import list_checkpoints
from steps import run_steps
from workers import Hosts, why_not

TIMEOUT_S = 900
SHARED = (encodings.idna, numpy.ctypeslib, numpy.ma)  # that every worker would import for itself: 5 MB of each
WORKER_MIB, SPARE_MIB = 15, 2048  # what a worker takes, most of it pages of the interpreter that a fork copies


def first_run(rank: int, steps: int, folder: str, victim: int, kill_after: int) -> dict[str, Any]:
    """A worker of the first run; the victim is a child of its process, which kills it after that step."""
    if rank != victim or (child := os.fork()) == 0:
        return run_steps(rank, WORK, steps, folder)
    while kill_after not in list_checkpoints(Path(folder)):
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(child, 0)
    return {"killed": killed}


def summary(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What joining and the steps took: of all workers, then of one, on average, and the most of what is limited."""
    steps = min(len(w["rows"]) for w in workers) - 1
    ends = [max(w["rows"][k]["end"] for w in workers) for k in range(1, steps + 1)]

    def of_a_step(name: str) -> float:
        spent = [statistics.median(b[name] - a[name] for a, b in pairwise(w["rows"][1:])) for w in workers]
        return statistics.mean(spent)

    return {
        "join_s": round(max(w["start_up_s"] for w in workers), 2),
        "join_cpu_ms": round(1e3 * statistics.mean(w["start_up_cpu_s"] for w in workers), 1),
        "steps": steps,
        "step_s": round(statistics.median(b - a for a, b in pairwise(ends)), 2),
        "step_cpu_ms": round(1e3 * of_a_step("cpu_s"), 1),
        "messages": round(of_a_step("messages"), 1),
        "kib": round(of_a_step("bytes") / 1024, 1),
        "connections": round(statistics.mean(w["rows"][-1]["connections"] for w in workers), 1),
        "most_connections": max(w["rows"][-1]["connections"] for w in workers),
        "private_mib": round(statistics.mean(w["rows"][-1]["private_mib"] for w in workers), 1),
        "most_open_files": max(w["rows"][-1]["open_files"] for w in workers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"bench/restart.py: {reason}")
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) // 1024
    n = min(args.workers, (free - SPARE_MIB) // WORKER_MIB // PER_HOST * PER_HOST)
    if n < args.workers:
        print(f"{free} MiB of memory are free: {n} workers fit")
    half, victim = args.steps // 2, n // 2 + 1
    with Hosts(n // PER_HOST) as hosts, tempfile.TemporaryDirectory() as folder:
        found = hosts.fork(PER_HOST, first_run, args.steps, folder, victim, half, timeout_s=TIMEOUT_S)
        killed = found.pop(victim)["killed"]
        ended = time.monotonic()
        before = summary(found)
        noticed = sorted(w["lost"] - killed for w in found)
        (newest, *_), start = list_checkpoints(Path(folder)), time.monotonic()
        print(f"first run: {json.dumps(before)}", flush=True)
        print(f"noticed after {noticed[0]:.2f} to {noticed[-1]:.2f} s; newest checkpoint: step {newest}", flush=True)
        again = hosts.fork(PER_HOST, run_steps, WORK, args.steps, folder, newest, timeout_s=TIMEOUT_S)
        after = summary(again)
        first_end = max(w["rows"][1]["end"] for w in again)
        last = list_checkpoints(Path(folder))[0]
    print(f"second run: {json.dumps(after)}")
    result = {
        "workers": n,
        "hosts": n // PER_HOST,
        "first_run": before,
        "noticed_s": {"median": round(statistics.median(noticed), 2), "last": round(noticed[-1], 2)},
        "all_ended_s": round(ended - killed, 2),
        "resumed_from": newest,
        "restart_to_first_step_s": round(first_end - start, 2),
        "second_run": after,
        "last_checkpoint": last,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
