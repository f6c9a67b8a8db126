"""The weight sync: what a worker derives for thousands of workers, and what it costs to move the weights here.

    python bench/weight_sync.py [--workers 1024 8192] [--layouts 2→2 …] [--rounds 7] [--mib 256]

Derived: Qwen2.5 7B and 72B from train dp N to generate dp N/tp × tp (2 and 8), on hosts of 8. Nothing is sent: it is
pure code, which a run executes once. CPU seconds by model and N, of the slowest of some ranks.

Moved: parameters of a small Qwen2.5, float32, sharded over the training ranks, to the generating ranks, by the
transport of a run; the first time they are compared. All are processes of one thread on this host; in one layout
they pretend to be on two, and use TCP. They take turns with a bare gloo broadcast of the bytes that a generating rank
gets, in one tensor, from one rank to all that generate. Medians of the rounds, of the slowest rank.

Extra memory is how far a rank's peak in its first weight sync is above what it had before, with the memory that it
shares with others, whoever has allocated it; weights are there before, on both sides. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.plan import Layout
from distflow.plan.topology import Topology
from distflow.weights import sync
from distflow.weights.shards import Shards, TensorSpec, size
from distflow.weights.sync import WeightSync
from workers import run_workers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from spawn import make_transport
from weights.message_count import SPECS, qwen

PER_HOST = 8
MIB = 1 << 20


MODELS = {"7B": (SPECS["7B"], 2), "72B": (SPECS["72B"], 8)}  # with the tp of generation


def weight_sync_s(model: str, n: int) -> float:
    """Returns the CPU seconds of the slowest of some ranks among n."""
    specs, tp = MODELS[model]
    ranks, seconds = tuple(range(n)), []
    topology = Topology(tuple(r // PER_HOST for r in ranks))
    source, destination = Shards(Layout(ranks, n), n), Shards(Layout(ranks, n // tp, tp), 1)
    for shards in (source, destination):
        shards.layout.replica_of(0)  # the index of a layout is the plan's, which has used it long before
    for rank in (0, n // 2 + 1, n - 1):
        start = time.process_time()
        WeightSync(specs, source, destination, rank, torch.bfloat16, topology)
        seconds.append(time.process_time() - start)
    return round(max(seconds), 4)


def small_model(mib: int) -> list[TensorSpec]:
    """Returns parameters of a Qwen2.5 with hidden size 1024 and a vocabulary that makes up about a quarter of `mib`."""
    hidden, layer = 1024, sum(size(tuple((0, n) for n in s.shape)) for s in qwen(1024, 2, 2816, 1)[3:])
    layers = max(1, 3 * mib * MIB // 4 // 4 // layer)
    vocabulary = mib * MIB // 4 // 4 // hidden
    return [
        TensorSpec("embed", (vocabulary, hidden)),
        *qwen(hidden, 2, 2816, layers)[3:],
        TensorSpec("norm", (hidden,)),
    ]


@dataclass(frozen=True)
class Case:
    trains: Layout
    generates: Layout
    hosts: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.hosts)


def split(sources: int, destinations: int, tp: int = 1, hosts: int = 1) -> Case:
    """Trains with dp on some ranks and generates on others."""
    world = sources + destinations
    trains, generates = (
        Layout(tuple(range(sources)), sources),
        Layout(tuple(range(sources, world)), destinations // tp, tp),
    )
    return Case(trains, generates, tuple(int(rank >= sources) * (hosts - 1) for rank in range(world)))


LAYOUTS = {
    "1→2": split(1, 2),
    "2→2": split(2, 2),
    "4→2": split(4, 2),
    "2→4": split(2, 4),
    "2→tp2": split(2, 2, tp=2),
    "tp2, colocated": Case(Layout((0, 1), 2), Layout((0, 1), 1, 2), (0, 0)),
    "2→2, two hosts": split(2, 2, hosts=2),
}


def worker(case: Case, rounds: int, mib: int) -> dict[str, Any]:
    """Syncs weights and broadcasts, in turns; returns the figures that rank 0 reports."""
    dist.init_process_group("gloo")
    rank, specs = dist.get_rank(), small_model(mib)
    source, destination = Shards(case.trains, case.trains.dp), Shards(case.generates, 1)
    held = weights(specs, source, rank)
    wanted = weights(specs, destination, rank)
    filled = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    transport = make_transport(rank, case.world, topology=Topology(case.hosts))
    transfer = WeightSync(specs, source, destination, rank, torch.float32, Topology(case.hosts))
    ranks = sorted({0, *case.generates.ranks})
    group = dist.new_group(ranks)
    taken = sum(size(destination.box(spec, case.generates.ranks[0])) for spec in specs)
    whole = torch.ones(taken) if rank in ranks else torch.empty(0)
    rows, extra = [], 0.0
    for i in range(rounds + 2):  # the first two warm up
        dist.barrier()
        transport.sent.clear()
        before = _reset_peak()
        start = time.perf_counter()
        transport.run(transfer.run(held, filled))
        took = time.perf_counter() - start
        if i == 0:
            extra = _status("VmHWM") - before
            assert all(torch.equal(filled[name], tensor) for name, tensor in wanted.items())
        dist.barrier()
        start = time.perf_counter()
        if rank in ranks:
            dist.broadcast(whole, 0, group=group)
        rows.append([took, time.perf_counter() - start])
    slowest = torch.tensor(rows[2:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    gives, takes = rank in case.trains.ranks, rank in case.generates.ranks
    most = torch.tensor([extra * takes, extra * gives, gives * sum(transport.sent.values())], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    transport.close()
    moved, broadcast = slowest.T.tolist()
    return {
        "sync_s": statistics.median(moved),
        "broadcast_s": statistics.median(broadcast),
        "sync_min_s": min(moved),
        "broadcast_min_s": min(broadcast),
        "destination_extra_mib": float(most[0]),
        "source_extra_mib": float(most[1]),
        "bytes_per_source_rank": int(most[2]),
        "bytes_per_destination_rank": taken * 4,
    }


def weights(specs: list[TensorSpec], shards: Shards, rank: int) -> dict[str, torch.Tensor]:
    """Returns a rank's part of parameters whose rows and columns all differ."""
    if rank not in shards.layout.ranks:
        return {}
    boxes = {spec.name: shards.box(spec, rank) for spec in specs}
    ranges = {name: [torch.arange(low, high).float() for low, high in box] for name, box in boxes.items()}
    return {name: r[0] if len(r) == 1 else 3 * r[0][:, None] + r[1] / 8 for name, r in ranges.items()}


def _reset_peak() -> float:
    """Makes the kernel count this process's peak memory anew; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> float:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        row = worker(LAYOUTS[args.layouts[0]], args.rounds, args.mib)
        if os.environ["RANK"] == "0":
            Path(args.worker).write_text(json.dumps(row))
        return
    derived = {name: {n: weight_sync_s(name, n) for n in args.workers} for name in MODELS}
    for name, times in derived.items():
        print(f"weight sync of {name}, derived: " + ", ".join(f"{s} s at {n:,}" for n, s in times.items()))
    rows = {}
    for name in args.layouts:
        words = ["--layouts", name, "--rounds", args.rounds, "--mib", args.mib]
        row = rows[name] = run_workers(__file__, LAYOUTS[name].world, *map(str, words))
        print(
            f"{name}: {row['bytes_per_destination_rank'] / MIB:.0f} MiB each in {row['sync_s']:.3f} s,"
            f" a broadcast {row['broadcast_s']:.3f} s; a source sends {row['bytes_per_source_rank'] / MIB:.0f} MiB;"
            f" extra {row['source_extra_mib']:.1f} MiB there, {row['destination_extra_mib']:.1f} MiB at the others",
            flush=True,
        )
    extras = [max(r["destination_extra_mib"], r["source_extra_mib"]) for r in rows.values()]
    result = {
        "vs_broadcast": {n: round(r["sync_s"] / r["broadcast_s"], 3) for n, r in rows.items()},
        "peak_extra_mib": round(max(extras, default=0), 1),
        "bytes_per_source_rank": {n: r["bytes_per_source_rank"] for n, r in rows.items()},
        "bucket_mib": sync._BUCKET / MIB,
        "rows": rows,
        "weight_sync_s": derived,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
