"""Exchanges 1024 samples × 4096 tokens × 6 fields (144 MiB) between layouts, compared with limits and peers.

    python bench/exchange.py [--workers 2 4 8] [--iters 9] [--peers DIR]

For each number of workers, one run measures in turn, iteration by iteration:
  ours             the exchange as it is used: agree on lengths, pack, send, unpack; shared memory on one host
  ours, sockets    the same over torch.distributed (gloo), as between hosts
  limit            a bare all_to_all_single of the same bytes, packed beforehand, into existing memory
  controller       our own single-controller path over torch.distributed: collect on one process, distribute again
  controller, shm  the same through shared memory
for three layouts: a worst-case reshuffle dp → dp, tp2 → dp, and two rank sets. Then the peers that are installed in
DIR (see bench/peers). Seconds are the slowest worker's. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from distflow.batch.batch import Column, Ragged
from distflow.comm.allocator import CachingAllocator
from distflow.comm.collectives import SendReceive
from distflow.comm.exchange import exchange
from distflow.comm.routes import contiguous_replicas, route
from distflow.comm.transport import SHARED_MEMORY, Transport
from distflow.comm.wire import Segments, flatten, pack, segment_size, unpack
from distflow.plan import Layout, Move, Partition
from distflow.plan.topology import Topology
from workers import run_workers

SAMPLES, TOKENS = 1024, 4096
FIELDS = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "old_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "advantages": torch.float32,
}
HERE = Path(__file__).resolve().parent


# ---------------------------------------------------------------------------------------------- one worker


def layouts(n: int) -> dict[str, tuple[Layout, Layout, bool]]:
    """Returns name → source, target, whether the exchange assigns replicas (else sample i goes to replica i mod n)."""
    all_ranks = tuple(range(n))
    half = n // 2
    return {
        "dp→dp": (Layout(all_ranks, n), Layout(all_ranks, n), False),
        "tp2→dp": (Layout(all_ranks, half, 2), Layout(all_ranks, n), False),
        "split ranks": (Layout(all_ranks[:half], half), Layout(all_ranks[half:], half), True),
    }


def columns(slots: np.ndarray, lengths: np.ndarray) -> dict[str, Column]:
    """Returns the fields of these samples; every value is the number of its sample."""
    mine = lengths[slots]
    ids = torch.from_numpy(np.repeat(slots, mine))
    return {f: Ragged.packed(ids.to(d), mine) for f, d in FIELDS.items()}


class Measure:
    """One layout on one worker: all paths, on the same data."""

    def __init__(
        self,
        rank: int,
        src: Layout,
        dst: Layout,
        assigns: bool,
        samples: int,
        lengths: np.ndarray,
        transports: dict[str, Transport],
    ) -> None:
        self.rank, self.samples, self.transports = rank, samples, transports
        self.allocator = CachingAllocator()
        self.move = Move(
            "m", Partition("a", src, True, None), Partition("b", dst, False, None), tuple(FIELDS), assigns, 0
        )
        self.old = contiguous_replicas(samples, src.dp)
        slots = np.flatnonzero(self.old == src.replica_of(rank))
        self.held = (slots, columns(slots, lengths)) if src.replica_of(rank) is not None else None
        replica = dst.replica_of(rank)
        self.wanted = None if replica is None or assigns else np.flatnonzero(np.arange(samples) % dst.dp == replica)
        moved = self.ours()
        self.check(moved.slots, moved.columns, lengths)
        self.bytes = {"sent": moved.sent, "received": moved.received, "kept": moved.kept}
        self._prepare_limit(dst, moved.slots)
        self._prepare_controller(src, dst)

    def ours(self, transport: str = "shm"):
        return self.transports[transport].run(
            exchange(self.rank, self.move, self.samples, 1, self.held, self.wanted, self.allocator)
        )

    def check(self, slots: np.ndarray, got: dict[str, Column], lengths: np.ndarray) -> None:
        for f, dtype in FIELDS.items() if len(slots) else ():
            for slot, row in zip(slots, got[f], strict=True):
                assert row.dtype == dtype
                assert len(row) == lengths[slot]
                assert (row == int(slot)).all()

    def _prepare_limit(self, dst: Layout, slots: np.ndarray) -> None:
        """Prepares the same bytes from and to the same ranks, including those that stay."""
        src = self.move.src.layout
        taken = _gather_ints(slots, self.samples)
        new = np.empty(self.samples, np.int64)
        for replica, ranks in enumerate(dst.replicas):
            new[taken[ranks[0]]] = replica
        self.new = new
        mine = route(self.rank, src, dst, self.old, new)
        self.per_sample = np.zeros(self.samples, np.int64)
        sizes = _gather_ints(self._sizes(), self.samples)
        for replica, ranks in enumerate(src.replicas):
            self.per_sample[self.old == replica] = sizes[ranks[0]]

        def size(s: np.ndarray) -> int:
            return segment_size(len(FIELDS), len(s), int(self.per_sample[s].sum()))

        ranks = self.move.ranks
        send = {r: size(s) for r, s in mine.send.items()} | {self.rank: size(mine.keep)}
        receive = {r: size(s) for r, s in mine.receive.items()} | {self.rank: size(mine.keep)}
        self._send = [send.get(r, 0) for r in ranks]
        self._receive = [receive.get(r, 0) for r in ranks]
        self._data = torch.ones(sum(self._send), dtype=torch.uint8)
        self._out = torch.ones(sum(self._receive), dtype=torch.uint8)

    def _sizes(self) -> np.ndarray:
        if self.held is None:
            return np.empty(0, np.int64)
        return sum(c.lengths * c.item_bytes for c in (flatten(c, "") for c in self.held[1].values()))  # type: ignore[return-value]

    def limit(self):
        dist.all_to_all_single(self._out, self._data, self._receive, self._send)

    def _prepare_controller(self, src: Layout, dst: Layout) -> None:
        """The first rank of a source replica sends its samples; every rank of a target replica receives its own."""
        fields = len(FIELDS)
        replicas = {c[0]: np.flatnonzero(self.old == d) for d, c in enumerate(src.replicas)}
        parts = {r: np.flatnonzero(self.new == dst.replica_of(r)) for r in dst.ranks}
        size = {k: segment_size(fields, len(s), int(self.per_sample[s].sum())) for k, s in replicas.items()}
        size_out = {k: segment_size(fields, len(s), int(self.per_sample[s].sum())) for k, s in parts.items()}
        self._collect = (replicas, size)
        self._distribute = (parts, size_out)
        self._controller_slab = torch.ones(sum(size.values()) if self.rank == 0 else 0, dtype=torch.uint8)
        self._mine_in = torch.ones(size_out.get(self.rank, 0), dtype=torch.uint8)

    def controller(self, transport: str):
        execute = self.transports[transport].execute
        replicas, size = self._collect
        parts, size_out = self._distribute

        def pack_mine(out: torch.Tensor) -> None:
            assert self.held is not None
            columns = [flatten(c, "") for c in self.held[1].values()]
            count = len(replicas[self.rank])
            pack(columns, np.arange(count), Segments(np.array([count]), np.array([0])), out)

        def pack_all(out: torch.Tensor) -> None:
            slots = np.concatenate(list(replicas.values()))
            got = Segments(np.array([len(s) for s in replicas.values()]), _starts(size))
            gathered = unpack(self._controller_slab, got, list(FIELDS), np.argsort(slots), "controller")
            columns = [flatten(c, "") for c in gathered.values()]
            to = Segments(np.array([len(s) for s in parts.values()]), _starts(size_out))
            pack(columns, np.concatenate(list(parts.values())), to, out)
            if 0 in parts:
                start, end = to_ranks[0]
                self._mine_in.copy_(out[start:end])

        collect, to_ranks = _ranges(size), _ranges(size_out)
        nothing = torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            if 0 in replicas:
                start, end = collect[0]
                pack_mine(self._controller_slab[start:end])
            receive = {r: part for r, part in collect.items() if r}
            execute(SendReceive(0, pack_mine, {}, self._controller_slab, receive))
            send = {r: part for r, part in to_ranks.items() if r}
            execute(SendReceive(sum(size_out.values()), pack_all, send, nothing, {}))
        else:
            if self.rank in replicas:
                execute(SendReceive(size[self.rank], pack_mine, {0: (0, size[self.rank])}, nothing, {}))
            if self.rank in parts:
                execute(SendReceive(0, pack_mine, {}, self._mine_in, {0: (0, size_out[self.rank])}))
        dist.barrier()  # the next collection must not overtake the distribution
        if self.rank in parts:
            count = len(parts[self.rank])
            unpack(self._mine_in, Segments(np.array([count]), np.array([0])), list(FIELDS), np.arange(count), "")


def _starts(sizes: dict[int, int]) -> np.ndarray:
    ends = np.cumsum(list(sizes.values()))
    return ends - list(sizes.values())


def _ranges(sizes: dict[int, int]) -> dict[int, tuple[int, int]]:
    return {r: (start, start + n) for (r, n), start in zip(sizes.items(), _starts(sizes).tolist(), strict=True)}


def _gather_ints(mine: np.ndarray, most: int) -> list[np.ndarray]:
    row = torch.full((most + 1,), -1, dtype=torch.int64)
    row[0] = len(mine)
    row[1 : len(mine) + 1] = torch.from_numpy(np.ascontiguousarray(mine))
    out = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(out, row)
    return [o[1 : int(o[0]) + 1].numpy() for o in out]


def timed(fn: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds from a common start until the slowest worker is done, and the CPU seconds of all workers.

    Leaving a barrier takes longer than a small exchange, so all sleep until a start time they have agreed on.
    """
    begin = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
    dist.all_reduce(begin, dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(begin) - time.perf_counter()))
    cpu = time.process_time()
    fn()
    total = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    wall = torch.tensor([time.perf_counter() - float(begin)], dtype=torch.float64)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(wall), float(total)


def _summary(runs: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*runs, strict=True)
    return {"s": statistics.median(wall), "min_s": min(wall), "cpu_s": statistics.median(cpu)}


def worker(iters: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    transports = {}
    for transport, shared in (("shm", "1"), ("sockets", "0")):
        os.environ[SHARED_MEMORY] = shared
        store, cpu = dist.distributed_c10d._get_default_store(), torch.device("cpu")
        made = Transport(rank, n, store, "127.0.0.1", cpu, lambda _: nullcontext(), transport)
        made.use(Topology.single(n))
        transports[transport] = made
    full = np.full(SAMPLES, TOKENS, np.int64)
    result: dict[str, object] = {"workers": n, "layouts": {}}
    for name, (src, dst, assigns) in layouts(n).items():
        m = Measure(rank, src, dst, assigns, SAMPLES, full, transports)
        paths: dict[str, Callable[[], object]] = {
            "ours": m.ours,
            "ours, sockets": partial(m.ours, "sockets"),
            "limit": m.limit,
            "controller": partial(m.controller, "sockets"),
            "controller, shm": partial(m.controller, "shm"),
        }
        runs: dict[str, list[tuple[float, float]]] = {p: [] for p in paths}
        for i in range(iters + 2):
            for path, fn in paths.items():
                t = timed(fn)
                if i >= 2:  # the first two warm memory and sockets
                    runs[path].append(t)
        result["layouts"][name] = {p: _summary(v) for p, v in runs.items()}  # type: ignore[index]
        del m, paths
    small = Measure(rank, *layouts(n)["dp→dp"], 8, np.full(8, 128, np.int64), transports)
    twenty = [timed(lambda: [small.ours() for _ in range(20)])[0] for _ in range(9)]
    result["small_ms"] = 1e3 * statistics.median(twenty) / 20
    # Realistic lengths: geometric, cut at the maximum, with a mean of a quarter of it.
    lengths = np.minimum(np.random.default_rng(0).geometric(1 / 1070, SAMPLES), TOKENS)
    ragged = Measure(rank, *layouts(n)["dp→dp"], SAMPLES, lengths, transports)
    dense = Measure(rank, *layouts(n)["dp→dp"], SAMPLES, full, transports)
    moved = torch.tensor([sum(ragged.bytes.values()), sum(dense.bytes.values())])
    dist.all_reduce(moved)
    result["ragged_bytes_fraction"] = float(moved[0] / moved[1])
    result["ragged_mean_length"] = float(lengths.mean() / TOKENS)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------- all workers


def run_peers(n: int, iters: int, peers: Path | None) -> dict[str, dict | None]:
    """Measures each peer on the reshuffle dp → dp, in its own environment; None if it is not installed."""
    results: dict[str, dict | None] = {}
    for name, script in (("verl", "verl_dataproto.py"), ("transferqueue", "transferqueue.py")):
        python = peers / "verl" / "bin" / "python" if peers else None
        if python is None or not python.exists():
            results[name] = None
            continue
        command = [str(python), str(HERE / "peers" / script), "--workers", str(n), "--iters", str(iters)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:  # Ray does not always start at the first attempt
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            print(f"  {name} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            results[name] = None
        else:
            results[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--iters", type=int, default=9)
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of the peers' environments")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.iters, args.worker)
        return
    rows = []
    for n in args.workers:
        row = run_workers(__file__, n, "--iters", str(args.iters))
        row["peers"] = run_peers(n, args.iters, args.peers)
        rows.append(row)
        summary = (
            f"small exchange {row['small_ms']:.2f} ms, ragged moves {row['ragged_bytes_fraction']:.3f} of the bytes"
        )
        print(f"N = {n}: {summary}")
        for name, r in row["layouts"].items():
            times = "  ".join(f"{p} {v['s']:.4f} s ({v['cpu_s']:.3f} CPU s)" for p, v in r.items())
            print(f"  {name:13s} {times}")
        for name, p in row["peers"].items():
            if p:
                print(f"  {name:13s} {p['s']:.4f} s ({p['cpu_s']:.3f} CPU s), {p['version']}")

    def worst(ratio: Callable[[dict], float], fewest: int = 0, pick: Callable = min) -> float | None:
        ratios = [ratio(r) for row in rows if row["workers"] >= fewest for r in row["layouts"].values()]
        return round(pick(ratios), 3) if ratios else None

    best_peer = []
    for row in rows:
        seconds = [p["s"] for p in row["peers"].values() if p]
        if seconds and row["workers"] >= 4:
            best_peer.append(min(seconds) / row["layouts"]["dp→dp"]["ours"]["s"])
    result = {
        "ratio_to_limit": worst(lambda r: r["ours"]["s"] / r["limit"]["s"], pick=max),
        "ratio_to_limit_sockets": worst(lambda r: r["ours, sockets"]["s"] / r["limit"]["s"], pick=max),
        "speedup_vs_controller": worst(lambda r: r["controller"]["s"] / r["ours"]["s"], 4),
        "speedup_vs_controller_shm": worst(lambda r: r["controller, shm"]["s"] / r["ours"]["s"], 4),
        "speedup_vs_best_peer": round(min(best_peer), 2) if best_peer else None,
        "ragged_bytes_fraction": round(max(r["ragged_bytes_fraction"] for r in rows), 4),
        "ragged_mean_length": round(rows[0]["ragged_mean_length"], 4),
        "small_ms": {row["workers"]: round(row["small_ms"], 2) for row in rows},
        "torch": torch.__version__,
        "rows": rows,
    }
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
