"""The weight hand-over: what a worker derives for thousands of workers, and what it costs to move the weights here.

    python bench/handover.py [--workers 1024 8192] [--givers 1 2 4] [--takers 2] [--rounds 7] [--mib 256]

Derived: Qwen2.5 7B and 72B from train dp N to generate dp N/tp × tp (2 and 8), on hosts of 8. Nothing is sent: it is
pure code, which a run executes once. CPU seconds by model and N, of the slowest of some ranks.

Moved: parameters of a small Qwen2.5, float32, sharded over N training ranks, to generating ranks that have them whole,
by the transport of a run. All are processes of one thread on this host. They take turns with a bare gloo broadcast of
the same bytes in one tensor, from one rank to those that generate. Medians of the rounds, of the slowest rank. Extra
memory is how far a rank's peak in a hand-over is above what it had before. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.engine import hand_over
from distflow.engine.hand_over import HandOver
from distflow.engine.weights import Shards, Spec, size
from distflow.plan import Layout
from distflow.plan.topology import Topology
from workers import run_workers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from spawn import make_transport

PER_HOST = 8
MIB = 1 << 20


def qwen(hidden: int, kv_heads: int, intermediate: int, layers: int) -> list[Spec]:
    """Returns the parameters of a Qwen2.5 model: heads of 128, biases of q, k and v, untied embeddings."""
    specs = [Spec("embed", (152_064, hidden)), Spec("norm", (hidden,)), Spec("lm_head", (152_064, hidden))]
    for i in range(layers):
        for name, rows in (("q", hidden), ("k", 128 * kv_heads), ("v", 128 * kv_heads)):
            specs += [Spec(f"{i}.{name}", (rows, hidden), 0), Spec(f"{i}.{name}.bias", (rows,), 0)]
        specs += [Spec(f"{i}.{name}", (intermediate, hidden), 0) for name in ("gate", "up")]
        specs += [Spec(f"{i}.o", (hidden, hidden), 1), Spec(f"{i}.down", (hidden, intermediate), 1)]
        specs += [Spec(f"{i}.{name}", (hidden,)) for name in ("norm1", "norm2")]
    return specs


MODELS = {"7B": (qwen(3584, 4, 18_944, 28), 2), "72B": (qwen(8192, 8, 29_568, 80), 8)}  # with the tp of generation


def handover_s(model: str, n: int) -> float:
    """Returns the CPU seconds of the slowest of some ranks among n."""
    specs, tp = MODELS[model]
    ranks, seconds = tuple(range(n)), []
    topology = Topology(tuple(r // PER_HOST for r in ranks))
    source, target = Shards(Layout(ranks, n), n), Shards(Layout(ranks, n // tp, tp), 1)
    for shards in (source, target):
        shards.layout.cell_of(0)  # the index of a layout is the plan's, which has used it long before
    for rank in (0, n // 2 + 1, n - 1):
        start = time.process_time()
        HandOver(specs, source, target, rank, torch.bfloat16, topology)
        seconds.append(time.process_time() - start)
    return round(max(seconds), 4)


def small_model(mib: int) -> list[Spec]:
    """Returns parameters of a Qwen2.5 with hidden size 1024 and a vocabulary that makes up about a quarter of `mib`."""
    hidden, layer = 1024, sum(size(tuple((0, n) for n in s.shape)) for s in qwen(1024, 2, 2816, 1)[3:])
    layers = max(1, 3 * mib * MIB // 4 // 4 // layer)
    vocabulary = mib * MIB // 4 // 4 // hidden
    return [Spec("embed", (vocabulary, hidden)), *qwen(hidden, 2, 2816, layers)[3:], Spec("norm", (hidden,))]


def worker(givers: int, takers: int, rounds: int, mib: int) -> dict[str, Any]:
    """Hands over and broadcasts, in turns; returns what rank 0 reports of all."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), givers + takers
    specs, transport = small_model(mib), make_transport(rank, world)
    trains, generates = Layout(tuple(range(givers)), givers), Layout(tuple(range(givers, world)), takers)
    source, target = Shards(trains, givers), Shards(generates, 1)
    shards = source if rank < givers else target
    parts = {s.name: torch.ones([high - low for low, high in shards.box(s, rank)]) for s in specs}
    held, filled = (parts, {}) if rank < givers else ({}, parts)
    transfer = HandOver(specs, source, target, rank, torch.float32, Topology.single(world))
    takes_part = [0, *generates.ranks]
    group = dist.new_group(takes_part)
    elements = sum(size(tuple((0, n) for n in s.shape)) for s in specs)
    whole = torch.ones(elements) if rank in takes_part else torch.empty(0)
    rows, sent, extra = [], 0, 0.0
    for i in range(rounds + 2):  # the first two warm up
        dist.barrier()
        transport.sent.clear()
        before = _reset_peak()
        start = time.perf_counter()
        transport.run(transfer.run(held, filled))
        took = time.perf_counter() - start
        sent = sum(transport.sent.values())
        extra = max(extra, _peak_mib() - before) if i > 1 else 0.0
        dist.barrier()
        start = time.perf_counter()
        if rank in takes_part:
            dist.broadcast(whole, 0, group=group)
        rows.append([took, time.perf_counter() - start])
    slowest = torch.tensor(rows[2:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    most = torch.tensor(
        [extra if rank >= givers else 0.0, extra if rank < givers else 0.0, sent if rank < givers else 0]
    )
    dist.all_reduce(most, dist.ReduceOp.MAX)
    transport.close()
    moved, broadcast = (statistics.median(column) for column in slowest.T.tolist())
    return {
        "hand_over_s": moved,
        "broadcast_s": broadcast,
        "taker_extra_mib": float(most[0]),
        "giver_extra_mib": float(most[1]),
        "bytes_per_giver": int(most[2]),
        "mib": elements * 4 / MIB,
    }


def _reset_peak() -> float:
    """Makes the kernel count this process's peak memory anew; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_mib() -> float:
    return _status("VmHWM")


def _status(key: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--givers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--takers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        row = worker(args.givers[0], args.takers, args.rounds, args.mib)
        if os.environ["RANK"] == "0":
            Path(args.worker).write_text(json.dumps(row))
        return
    derived = {name: {n: handover_s(name, n) for n in args.workers} for name in MODELS}
    for name, times in derived.items():
        print(f"hand-over of {name}, derived: " + ", ".join(f"{s} s at {n:,}" for n, s in times.items()))
    rows = {}
    for n in args.givers:
        words = ["--givers", n, "--takers", args.takers, "--rounds", args.rounds, "--mib", args.mib]
        row = rows[n] = run_workers(__file__, n + args.takers, *map(str, words))
        print(
            f"{n} → {args.takers}: {row['mib']:.0f} MiB in {row['hand_over_s']:.3f} s, a broadcast"
            f" {row['broadcast_s']:.3f} s; a giver sends {row['bytes_per_giver'] / MIB:.0f} MiB; extra memory"
            f" {row['taker_extra_mib']:.0f} MiB where they come, {row['giver_extra_mib']:.0f} MiB where they are given"
        )
    result = {
        "vs_broadcast": {n: round(r["hand_over_s"] / r["broadcast_s"], 3) for n, r in rows.items()},
        "peak_extra_mib": round(
            max((max(r["taker_extra_mib"], r["giver_extra_mib"]) for r in rows.values()), default=0), 1
        ),
        "bytes_per_giver": {n: r["bytes_per_giver"] for n, r in rows.items()},
        "bucket_mib": hand_over._BUCKET / MIB,
        "rows": rows,
        "handover_s": derived,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
