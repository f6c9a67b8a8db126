"""What grows with the number of workers, in the parts that run without workers: plan, routes, weight sync, checkpoint.

    python bench/growth.py [--workers 1024 4096 16384 65536] [--samples 16]

CPU seconds of one worker and bytes that it receives, for GRPO with a 7B model on hosts of 8, tp 2 in generation, and
`--samples` samples of a worker. Messages and connections are those of the simulator, which tests hold against the
workers' own code. The last line is one JSON object.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from distflow.comm.balance import imbalance
from distflow.comm.routes import assign_replicas, contiguous_replicas, route
from distflow.plan import Layout, Move, Plan, SyncWeights
from distflow.simulate import Costs, FieldBytes, load_hardware, load_model, simulate
from distflow.simulate.traffic import header_bytes
from routes import heavy_tailed
from simulator import Setting
from weight_sync import weight_sync_s

MODEL, PER_HOST, REPEAT = "qwen2.5-7b", 8, 8


def cpu_s(function: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """Returns the least CPU seconds of a call, and its result."""
    least, result = math.inf, None
    for _ in range(times):
        start = time.process_time()
        result = function()
        least = min(least, time.process_time() - start)
    return least, result


def routes(workers: int, samples: int) -> dict[str, float]:
    """The deal of a step's samples, which every worker computes for itself, and what goes to the first."""
    layout, lengths = Layout(tuple(range(workers)), workers), heavy_tailed(samples, 0)
    old = contiguous_replicas(samples, workers)
    deal_s, new = cpu_s(lambda: assign_replicas(old, layout, layout, lengths, 1, balance=True))
    route_s, _ = cpu_s(lambda: route(0, layout, layout, old, new))
    return {"deal_s": deal_s, "route_s": route_s, "imbalance": imbalance(new, lengths, workers)}


def control(plan: Plan) -> dict[str, float]:
    """Messages of the worker that sends most, in a step that does nothing else."""
    weightless = replace(plan, tasks=tuple(t for t in plan.tasks if not isinstance(t, SyncWeights)))
    costs = Costs(fields={f: FieldBytes(sample=1.0) for f in plan.flow.writer})
    result = simulate(weightless, load_hardware("h100"), costs)
    headers = [header_bytes(t, plan.samples, plan.repeat) * len(t.ranks) for t in plan.tasks if isinstance(t, Move)]
    return {"messages": result.messages, "header_bytes": float(sum(headers))}


def row(workers: int, samples: int) -> dict[str, float]:
    setting = Setting(
        load_hardware("h100"), MODEL, workers, workers * samples // REPEAT, REPEAT, 4096, 1000, 0.5, generate_tp=2
    )
    plan_s, plan = cpu_s(setting.plan)
    hash_s, _ = cpu_s(lambda: plan.hash)
    parameters = load_model(MODEL).params
    return {
        "workers": workers,
        "samples": plan.samples,
        "plan_s": plan_s,
        "hash_s": hash_s,
        "plan_bytes": len(json.dumps(plan.to_json())),
        **routes(workers, plan.samples),
        **control(plan),
        "weight_sync_s": weight_sync_s("7B", workers),
        "checkpoint_files": workers,
        "checkpoint_bytes_per_file": 12 * parameters / workers,
        "store_connections": workers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--samples", type=int, default=16, help="of a worker and step")
    args = parser.parse_args()
    rows = []
    for workers in args.workers:
        rows.append(row(workers, args.samples))
        shown = {k: float(np.format_float_positional(v, 3, fractional=False)) for k, v in rows[-1].items()}
        print(" ".join(f"{k} {v:,g}" for k, v in shown.items()), flush=True)
    growth = {k: round(rows[-1][k] / rows[0][k], 2) for k in rows[0] if rows[0][k]}
    print(json.dumps({"rows": rows, "growth": growth}))


if __name__ == "__main__":
    main()
