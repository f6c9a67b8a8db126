"""No central process: with a fixed batch per worker, no worker sends, receives or holds more when N grows.

    python bench/scale.py [--workers 2 4 8] [--steps 5]

Each worker generates 64 samples (about 2,000 tokens, 6 fields; the same lengths everywhere); half of them judge
all samples; all train on them with tp 2, balanced. Bytes and memory are those of the busiest worker. The last line is
one JSON object.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distflow.batch.batch import Batch, Ragged
from distflow.comm.transport import Transport
from distflow.coordinator.coordinator import Coordinator, StepTraffic
from distflow.dataset.loader import Loader
from distflow.flow import Flow, Node
from distflow.plan import Place, Placement, Plan, Workload
from distflow.plan import plan as derive_plan
from distflow.plan.topology import Topology
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Worker
from workers import run_workers

INTS, FLOATS = ("tokens", "mask", "position"), ("old_logprobs", "ref_logprobs", "advantage")


class EmptyRows:
    column_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> dict:
        return {}


def generate(batch: Batch) -> dict:
    lengths = np.array([np.random.default_rng(int(i) % 64).lognormal(7.5, 0.5) for i in batch.ids]).astype(np.int64)
    total = int(lengths.sum())
    ints = {f: Ragged.packed(torch.zeros(total, dtype=torch.int64), lengths) for f in INTS}
    return ints | {f: Ragged.packed(torch.zeros(total), lengths) for f in FLOATS}


def judge(batch: Batch) -> dict:
    return {"score": torch.zeros(len(batch))}


def update(batch: Batch) -> None:
    assert all(len(batch[f]) == len(batch) for f in (*INTS, *FLOATS, "score"))


def make_plan(workers: int) -> Plan:
    nodes = (
        Node("generate", writes=(*INTS, *FLOATS), fn=generate),
        Node("judge", reads=("tokens",), writes=("score",), fn=judge),
        Node("update", reads=(*INTS, *FLOATS, "score"), balance="tokens", fn=update),
    )
    places = {"judge": Place("half"), "update": Place(tp=2)}
    return derive_plan(
        Flow("scale", (), nodes), Placement(workers, {"half": "50%-"}, nodes=places), Workload(64 * workers)
    )


def memory_kib(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1])


def worker(steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    plan = make_plan(n)
    store = dist.distributed_c10d._get_default_store()
    transport = Transport(rank, n, store, "127.0.0.1", torch.device("cpu"), lambda _: nullcontext())
    transport.use(Topology.single(n))
    data = Coordinator(rank, plan, Loader(EmptyRows(), plan.samples, 1, seed=0))
    traffic: list[StepTraffic] = []
    end_step = data.end_step
    data.end_step = lambda step: traffic.append(end_step(step)) or traffic[-1]  # type: ignore[method-assign, func-returns-value]
    before = memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    transport.run(Worker(data, Comm(rank, plan, {}, Versions(last=steps))).steps(lambda *_: None))
    peak = memory_kib("VmHWM") - before
    busiest = [max(t.sent for t in traffic), max(t.received for t in traffic), peak * 1024]
    most = torch.tensor(busiest)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        sent, received, held = most.tolist()
        row = {"workers": n, "samples": plan.samples, "sent": sent, "received": received, "peak_memory": held}
        Path(out).write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.steps, args.worker)
        return
    rows = []
    print(f"{'workers':>8} {'samples':>8} {'most sent':>12} {'most received':>14} {'peak memory':>12}   MiB a step")
    for n in args.workers:
        rows.append(run_workers(__file__, n, "--steps", str(args.steps)))
        r = rows[-1]
        sent, received, held = (r[k] / 2**20 for k in ("sent", "received", "peak_memory"))
        print(f"{n:8d} {r['samples']:8d} {sent:12.2f} {received:14.2f} {held:12.1f}")
    growth = {k: round(max(r[k] for r in rows[1:]) / rows[0][k], 3) for k in ("sent", "received", "peak_memory")}
    print(json.dumps({"growth": growth, "rows": rows}))


if __name__ == "__main__":
    main()
