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
from distflow.comm.domains import Domain, Domains
from distflow.comm.routes import assign_replicas, contiguous_replicas, route
from distflow.plan import Layout, Plan, SyncWeights
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


def deal(src: Layout, dst: Layout, samples: int) -> dict[str, float]:
    """The deal of these samples, which every worker that takes part computes for itself, and the route of rank 0."""
    lengths, old = heavy_tailed(samples, 0), contiguous_replicas(samples, src.dp)
    deal_s, new = cpu_s(lambda: assign_replicas(old, src, dst, lengths, 1, balance=True))
    route_s, _ = cpu_s(lambda: route(0, src, dst, old, new))
    return {"deal_s": deal_s, "route_s": route_s, "imbalance": imbalance(new, lengths, dst.dp)}


def moves(plan: Plan) -> dict[str, float]:
    """What the moves of a step cost rank 0: metadata, and a balanced deal among the ranks of its domain."""
    domains_s, own = cpu_s(lambda: _domains_of_first(plan))
    headers = sum(header_bytes(d.move, d.samples, plan.repeat) * len(d.move.ranks) for d in own if not d.known)
    first = next(d for d in own if d.move.assigns)
    src, dst = first.move.src.layout, first.move.dst.layout
    every = Layout(tuple(range(plan.workers)), plan.workers)
    undivided = deal(every, every, plan.samples)["deal_s"]
    found = {"domains_s": domains_s, "domain_ranks": len(first.move.ranks), "header_bytes": float(headers)}
    return found | deal(src, dst, first.samples) | {"deal_without_domains_s": undivided}


def _domains_of_first(plan: Plan) -> list[Domain]:
    domains = Domains(plan, plan.samples)
    return [domains.of(move, 0) for move in plan.moves if 0 in move.ranks]


def control(plan: Plan) -> dict[str, float]:
    """Messages of the worker that sends most, in a step that does nothing else."""
    weightless = replace(plan, tasks=tuple(t for t in plan.tasks if not isinstance(t, SyncWeights)))
    costs = Costs(fields={f: FieldBytes(sample=1.0) for f in plan.flow.writer})
    result = simulate(weightless, load_hardware("h100"), costs)
    return {"messages": result.messages}


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
        **moves(plan),
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
