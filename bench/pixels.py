"""Steps of GRPO on pictures, without a model: what reading, processing and moving their pixels costs.

Ours: each worker reads the pictures of its own prompts, and the plan moves references. Against it a single controller
in our own wire format and sockets, as kind to that design as can be: its driver reads and processes every picture, and
sends the pixels of a prompt, once for all of its responses, to the workers of each stage that needs them. The batch
grows until the driver needs more memory than it may have. With `.peers/verl` (bench/peers/README.md) also verl's
DataProto through a Ray driver, with pictures that are processed already. Hosts are network namespaces with shaped
links.

    python bench/pixels.py --json pixels.json     # 4 hosts
    python bench/pixels.py --quick
"""

import argparse
import io
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from controller import can_limit_memory, memory_limit
from distflow.batch.batch import Batch, Ragged
from distflow.comm.collectives import SendReceive
from distflow.coordinator.coordinator import Coordinator
from distflow.dataset.dataset import Dataset
from distflow.dataset.loader import Loader
from distflow.dataset.view import DatasetView
from distflow.flow import Flow, Node
from distflow.model.images import Images
from distflow.observe.metrics import StepMetrics
from distflow.plan import Place, Placement, Workload
from distflow.plan import plan as derive_plan
from distflow.roles.role import Role
from distflow.run.comm import Comm
from distflow.run.versions import Versions
from distflow.run.worker import Surroundings, Worker
from ray_cluster import RAY_FOLDER, RayCluster
from steps import join
from workers import Hosts, why_not

IMAGES, PROMPT = "images", "prompt"
SIDE = 336  # pixels: 24 × 24 patches of 14, 144 tokens
STAGES = ("generate", "old", "ref", "update")  # that need pixels


@dataclass(frozen=True)
class Work:
    """A step: `prompts` per worker, each with one picture and `n` responses."""

    prompts: int
    n: int
    file: str


def processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class Processor:
        """The processor of Qwen2.5-VL, without its tokenizer."""

        image_token_id, valid_processor_kwargs = 1, None
        image_processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)

        def tokenizer(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

        def replace_image_token(self, made: Any, image_idx: int) -> str:
            return "i" * int(made["image_grid_thw"][image_idx].prod() // 4)

    return Processor()


def write_rows(file: Path, count: int) -> None:
    """Writes prompts with pictures that JPEG compresses as it does photographs."""
    noise = np.random.default_rng(0)
    rows = []
    for i in range(count):
        coarse = Image.fromarray(noise.integers(0, 256, (24, 24, 3), np.uint8))
        out = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        rows.append({"prompt": f"<image>What is in picture {i}?", "images": [{"bytes": out.getvalue()}]})
    pq.write_table(pa.Table.from_pylist(rows), file)


def view_of(file: str) -> DatasetView:
    return DatasetView(Dataset([file], cache=Path(file).parent), {}, images="train")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Actor(Role):
    """Uses the pixels of each prompt in every stage; what a model would compute of them takes no time."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def generate(self, batch: Batch) -> dict[str, Ragged]:
        self._see(batch)
        n = np.full(len(batch), TOKENS, np.int64)
        return {"tokens": Ragged.packed(torch.zeros(int(n.sum()), dtype=torch.int64), n)}

    def old(self, batch: Batch) -> Ragged:
        return self._numbers(batch)

    def ref(self, batch: Batch) -> Ragged:
        return self._numbers(batch)

    def update(self, batch: Batch) -> None:
        self._see(batch)

    def _numbers(self, batch: Batch) -> Ragged:
        self._see(batch)
        n = batch["tokens"].lengths
        return Ragged.packed(torch.zeros(int(n.sum())), n)

    def _see(self, batch: Batch) -> None:
        for reference in {r for row in batch[IMAGES] for r in row}:
            assert self.images.processed(reference).tensors["pixel_values"].numel()


N, TOKENS = 8, 256  # responses of a prompt, and tokens of each


def our_step_ends(rank: int, work: Work, steps: int, folder: str) -> dict[str, Any]:
    """One worker of ours: when each step ended, and the most memory it has used."""
    torch.set_num_threads(1)
    me = join()

    def actor(name: str, **more: Any) -> Node:
        return Node(name, role="actor", call=f"actor.{name}", method=True, fn=getattr(Actor, name), **more)

    seen = ("tokens", IMAGES)
    nodes = (
        actor("generate", type="inference", reads=(PROMPT, IMAGES), writes=("tokens",)),
        actor("old", type="inference", reads=seen, writes=("old_logprobs",), balance="tokens"),
        actor("ref", type="inference", reads=seen, writes=("ref_logprobs",), balance="tokens"),
        actor("update", type="train", reads=(*seen, "old_logprobs", "ref_logprobs"), balance="tokens"),
    )
    # Half of the ranks generate, the others train: every reference moves, and both read its picture.
    sets = {name: ",".join(map(str, range(i, me.workers, 2))) for i, name in enumerate(("rollout", "train"))}
    places = {"generate": Place("rollout"), "data": Place("rollout")}
    placement = Placement(me.workers, sets, Place("train"), nodes=places)
    samples = work.prompts * me.workers // 2
    plan = derive_plan(Flow("grpo", (PROMPT, IMAGES), nodes), placement, Workload(samples, work.n, {}))
    view = view_of(work.file)
    images = Images(processor(), {"train": view.whole_row})
    data = Coordinator(me.rank, plan, Loader(view, samples, work.n, seed=0), me.topology)
    data.on_free[IMAGES] = images.free
    comm = Comm(me.rank, plan, {"actor": Actor(images)}, Versions(plan.staleness, 0, steps))
    worker = Worker(data, comm, Surroundings(0, Path(folder)))
    ends = [time.monotonic()]

    def end_of_step(step: int, _: StepMetrics) -> None:
        ends.append(time.monotonic())

    def after_step(step: int, _: StepMetrics) -> Any:
        yield from ()

    before = peak_mib()
    me.transport.run(worker.steps(end_of_step, after_step))
    assert images.nbytes == 0, "the plan has freed all"
    return {"ends": ends, "mib": peak_mib() - before, "sent": me.transport.bytes}


def controlled_step_ends(rank: int, per_host: int, work: Work, steps: int, cgroup: int | None) -> dict[str, Any] | None:
    """One process: the first `per_host` of each host are workers, the next one of the first host is the driver."""
    torch.set_num_threads(1)
    driver, local = per_host, rank % (per_host + 1)
    if cgroup is not None and rank == driver:
        os.write(cgroup, b"0")
    me = join()
    if rank != driver and local == per_host:
        return None
    workers = [r for r in range(me.workers) if r % (per_host + 1) < per_host]
    generating, training = workers[::2], workers[1::2]
    none, ends = torch.empty(0, dtype=torch.uint8), [time.monotonic()]
    before = peak_mib()
    view = view_of(work.file)
    images = Images(processor(), {"train": view.whole_row})
    count = work.prompts * len(workers) // 2
    share = count // len(generating)
    pixels = images._of(Image.new("RGB", (SIDE, SIDE))).tensors["pixel_values"]
    per_prompt = pixels.numel() * pixels.element_size()
    text = 16 * TOKENS * work.n  # bytes of a prompt's responses, each way
    for step in range(steps):
        if rank == driver:
            rows = [view[(step * count + i) % len(view)] for i in range(count)]
            batch = torch.empty(count, per_prompt, dtype=torch.uint8)
            for place, row in zip(batch, rows, strict=True):
                made = images.processed(row[IMAGES][0]).tensors["pixel_values"]
                place.copy_(made.reshape(-1).view(torch.uint8))
                images.forget(row[IMAGES])
        for stage in STAGES:
            ranks = generating if stage == "generate" else training
            size = share * (per_prompt + text)
            if rank == driver:
                places = {r: (i * size, (i + 1) * size) for i, r in enumerate(ranks)}

                def fill(out: torch.Tensor) -> None:
                    whole = out.view(len(ranks), size)  # noqa: B023
                    whole[:, : share * per_prompt] = batch.view(len(ranks), -1)  # noqa: B023

                me.transport.execute(SendReceive(size * len(ranks), fill, places, none, {}))
                back = torch.empty(share * text * len(ranks), dtype=torch.uint8)
                got = {r: (i * share * text, (i + 1) * share * text) for i, r in enumerate(ranks)}
                me.transport.execute(SendReceive(0, lambda _: None, {}, back, got))
            elif rank in ranks:
                out = torch.empty(size, dtype=torch.uint8)
                me.transport.execute(SendReceive(0, lambda _: None, {}, out, {driver: (0, size)}))
                end = share * text
                me.transport.execute(SendReceive(end, lambda out: None, {driver: (0, end)}, none, {}))
        ends.append(time.monotonic())
    return {"ends": ends, "mib": peak_mib() - before, "sent": me.transport.bytes}


def by_verl(python: Path, args: argparse.Namespace, folder: Path) -> dict[int, float]:
    """Returns the seconds of a step by verl, for each number of prompts of a host that it survives."""
    found: dict[int, float] = {}
    floats = Images(processor(), {})._of(Image.new("RGB", (SIDE, SIDE))).tensors["pixel_values"].numel()
    with Hosts(args.hosts, rate=args.rate, private=[RAY_FOLDER]) as hosts:
        cluster = RayCluster(hosts, python, folder / "peers.log", timeout_s=200)
        cluster.grow(args.hosts)
        for prompts in args.prompts:
            size = {"rows": prompts * N, "tokens": TOKENS, "steps": 1}
            try:
                [found[prompts]] = cluster.ask(
                    system="verl", hosts=args.hosts, **size, pixels={"n": N, "floats": floats}
                )
            except RuntimeError as e:
                print(f"verl, {prompts * args.hosts} prompts: {e}", file=sys.stderr, flush=True)
                break
            print(f"verl, {prompts * args.hosts} prompts: {found[prompts]:.2f} s", flush=True)
    return found


def seconds(results: Sequence[dict[str, Any] | None]) -> float:
    """Returns the median of the steps after the first, which connects everybody."""
    ends = [max(r["ends"][k] for r in results if r) for k in range(len(next(r for r in results if r)["ends"]))]
    return statistics.median([b - a for a, b in pairwise(ends)][1:])


def peak(results: Sequence[dict[str, Any] | None]) -> int:
    """Returns by how many MiB the memory of a process grew, of the one that needed most."""
    return round(max(r["mib"] for r in results if r))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="of a worker that generates")
    parser.add_argument("--steps", type=int, default=4, help="the first of which is not counted")
    parser.add_argument("--rate", default="200mbit", help="of every link, each way")
    parser.add_argument("--limit", type=int, default=512, help="MiB that the driver may use")
    parser.add_argument("--peers", type=Path, default=Path(__file__).resolve().parent.parent / ".peers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two hosts, two batches")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no hosts on this machine: {reason}")
    if args.quick:
        args.hosts, args.prompts, args.steps = 2, [2, 4], 3
    result: dict[str, Any] = {"hosts": args.hosts, "rate": args.rate, "limit_mib": args.limit, "batches": []}
    with tempfile.TemporaryDirectory(prefix="pixels-") as folder:
        file = Path(folder) / "rows.parquet"
        write_rows(file, max(args.prompts) * args.hosts * 2)
        list(view_of(str(file))[0])  # the index, which is built once per host
        works = [Work(p, N, str(file)) for p in args.prompts]
        with Hosts(args.hosts, rate=args.rate) as hosts:
            for work in works:
                ours = hosts.fork(2, our_step_ends, work, args.steps, folder, timeout_s=300)
                row = {"prompts": work.prompts * args.hosts, "ours_s": round(seconds(ours), 3)}
                row |= {
                    "ours_mib": round(max(r["mib"] for r in ours)),
                    "ours_sent_kib": sum(r["sent"] for r in ours) // 1024,
                }
                try:
                    theirs = controlled(hosts, work, args)
                except (RuntimeError, AssertionError) as e:
                    row["controller"] = f"out of its {args.limit} MiB" if "memory" in str(e) else str(e)[:200]
                else:
                    row |= {
                        "controller_s": round(seconds(theirs), 3),
                        "controller_mib": round(max(r["mib"] for r in theirs if r)),
                    }
                    row["speedup"] = round(row["controller_s"] / row["ours_s"], 2)
                result["batches"].append(row)
                print(json.dumps(row), flush=True)
            by_n = {}
            for n in (8, 64):
                ours = hosts.fork(2, our_step_ends, replace(works[-1], n=n), args.steps, folder, timeout_s=300)
                by_n[f"n{n}"] = peak(ours)
        python = args.peers / "verl" / "bin" / "python"
        if python.exists():
            for row, verl_s in zip(result["batches"], by_verl(python, args, Path(folder)).values(), strict=False):
                row |= {"verl_s": round(verl_s, 3), "speedup_vs_verl": round(verl_s / row["ours_s"], 2)}
    both = [b for b in result["batches"] if "speedup" in b]
    result |= {"host_mib": by_n, "speedup_at_largest_batch": both[-1]["speedup"] if both else None}
    if args.json:
        args.json.write_text(json.dumps(result))
    print(json.dumps(result))


def controlled(hosts: Hosts, work: Work, args: argparse.Namespace) -> list[Any]:
    if not can_limit_memory():
        return hosts.fork(3, controlled_step_ends, 2, work, args.steps, None, timeout_s=300)
    with memory_limit(args.limit << 20) as (cgroup, killed):
        try:
            return hosts.fork(3, controlled_step_ends, 2, work, args.steps, cgroup, timeout_s=300)
        except Exception as e:
            if killed():
                raise RuntimeError("memory") from e
            raise


if __name__ == "__main__":
    main()
