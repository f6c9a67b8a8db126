"""The steps of bench/scaling.py as the simulator predicts them, beside the same steps measured on shaped hosts.

    python bench/predicted.py [--hosts 2 4 8] [--rate 100mbit] [--tokens 4096] [--steps 3] [--placements]

`predict` is pure and needs no hosts. The CPU costs of the hardware file `namespaces` come from other runs; nothing is
fitted here. `--placements`: does the order in which `distflow simulate --search` would propose placements agree with
the measured one? Compute is then a sleep as long as two data planes, divided among the ranks that do it. Measuring
needs root. The last line is one JSON object.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # a fork of a process with threads may hang

import argparse
import json
import tempfile
from dataclasses import replace
from statistics import median
from typing import Any

from distflow.plan.topology import Topology
from distflow.simulate import Costs, FieldBytes, Hardware, SimulatedStep, load_hardware, simulate
from steps import COMPUTE, ROLLOUT, Work, compute_share, lengths, make_plan, weight_bytes
from workers import Hosts, why_not

PER_HOST = 2
WORK = Work(rows=32, tokens=4096, hidden=128, layers=4)
UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}  # bytes per second


def predict(
    work: Work, hosts: int, per_host: int, rate: float, step: int = 1, hardware: Hardware | None = None
) -> SimulatedStep:
    """Predicts a step of bench/steps.py on hosts whose links carry `rate` bytes a second in each direction."""
    plan = make_plan(hosts * per_host, work)
    costs = Costs(
        seconds={
            n.id: COMPUTE[n.id] * work.compute_s * (compute_share(plan, n.id) if work.shared else 1.0)
            for n in plan.flow.nodes
            if n.id in COMPUTE
        },
        weight_bytes={"actor": weight_bytes(work)},
        fields={f: FieldBytes(response_token=size) for f, size in work.token_bytes.items()},
        lengths=lengths(range(step * plan.samples, (step + 1) * plan.samples), work.tokens).tolist(),
        dtype_bytes=4,
    )
    hardware = hardware or load_hardware("namespaces", network={"rate": rate})
    return simulate(plan, hardware, costs, Topology(tuple(r // per_host for r in range(plan.workers))))


def placements(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """Measures and predicts steps in several placements, on each number of hosts; the compute is the same in all."""
    from links import decentralised

    found: dict[str, Any] = {}
    for n in args.hosts:
        with Hosts(n, args.rate) as hosts, tempfile.TemporaryDirectory() as folder:

            def measure(work: Work) -> float:
                return decentralised(hosts, PER_HOST, work, args.steps, folder).s

            compute_s = 2 * measure(replace(work, split=True))
            whole = replace(work, compute_s=compute_s, shared=True)
            variants = {f"colocated, tp {tp}": replace(whole, tp=tp) for tp in (1, 2, 4)}
            variants |= {f"split {p}:{100 - p}": replace(whole, split=True, rollout=p) for p in ROLLOUT}
            rows = {}
            for name, variant in variants.items():
                steps = [
                    predict(variant, n, PER_HOST, bytes_per_s(args.rate), k).step_s for k in range(1, args.steps + 1)
                ]
                rows[name] = {"measured_s": round(measure(variant), 3), "predicted_s": round(median(steps), 3)}
                print(f"{n} hosts, {name}: {rows[name]}", flush=True)
        order = {kind: sorted(rows, key=lambda name: rows[name][kind]) for kind in ("measured_s", "predicted_s")}
        pairs = [(a, b) for i, a in enumerate(order["measured_s"]) for b in order["measured_s"][i + 1 :]]
        alike = sum(rows[a]["predicted_s"] < rows[b]["predicted_s"] for a, b in pairs)
        best = order["measured_s"][0], order["predicted_s"][0]
        found[str(n)] = {"rows": rows, "best": best, "pairs_alike": alike, "pairs": len(pairs)}
    return found


def bytes_per_s(rate: str) -> float:
    """Returns what a rate as `tc` writes it, 100mbit, is in bytes per second."""
    unit = next(u for u in UNITS if rate.endswith(u))
    return float(rate.removesuffix(unit)) * UNITS[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--tokens", type=int, default=WORK.tokens)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--placements", action="store_true")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"bench/predicted.py: {reason}")
    from links import decentralised

    rate = bytes_per_s(args.rate)
    if args.placements:
        print(json.dumps(placements(replace(WORK, tokens=args.tokens), args)))
        return
    rows: list[dict[str, Any]] = []
    columns = ("measured s", "predicted s", "error", "busiest link, MiB", "predicted")
    print(f"{'hosts':>6}  {'':18}" + "".join(f"{c:>{w}}" for c, w in zip(columns, (12, 12, 9, 19, 11), strict=True)))
    for n in args.hosts:
        with Hosts(n, args.rate) as hosts:
            for name, split in (("every byte moves", True), ("colocated", False)):
                work = replace(WORK, tokens=args.tokens, split=split)
                with tempfile.TemporaryDirectory() as folder:
                    measured = decentralised(hosts, PER_HOST, work, args.steps, folder)
                steps = [predict(work, n, PER_HOST, rate, k) for k in range(1, args.steps + 1)]
                result = sorted(steps, key=lambda r: r.step_s)[len(steps) // 2]
                busiest = max(r.links.busiest for r in steps)
                row = {
                    "hosts": n,
                    "name": name,
                    "measured_s": round(measured.s, 4),
                    "predicted_s": round(result.step_s, 4),
                    "error": round(result.step_s / measured.s - 1, 4),
                    "measured_link_mib": round(measured.busiest / 2**20, 3),
                    "predicted_link_mib": round(busiest / 2**20, 3),
                    "measured_messages": round(measured.messages, 1),
                    "predicted_messages": result.messages,
                }
                rows.append(row)
                print(
                    f"{n:6}  {name:18}{row['measured_s']:12.3f}{row['predicted_s']:12.3f}{100 * row['error']:7.1f} %"
                    f"{row['measured_link_mib']:19.2f}{row['predicted_link_mib']:11.2f}",
                    flush=True,
                )
    print(json.dumps({"rate": args.rate, "rows": rows}))


if __name__ == "__main__":
    main()
