"""What a checkpoint costs the steps that run while it is written: in one run, stretches of steps with one and without.

`python bench/checkpoint.py [--rounds 8] [--stretch 4]`: a GRPO run of the 4M model of bench/step.py on two workers of
one thread each, weights and optimiser (48 MB) saved every other stretch. Then, derived but not read: how many files of
tensors a worker of 1,024 opens when it resumes a 7B model. One JSON object is the last line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from assets import make_assets
from distflow.checkpoint.tensor_index import StoredTensor, TensorIndex
from distflow.plan import Layout
from distflow.weights.shards import Shards
from weight_sync import MODELS

WRITTEN = (1024, 1, 1024)  # dp, tp, shard
READ = {"same": WRITTEN, "half": (512, 1, 512), "tp4": (256, 4, 256)}
MOMENTS = ("weights", "exp_avg", "exp_avg_sq")


def files_opened(read: tuple[int, int, int]) -> tuple[int, float]:
    """Returns the most files that one of some workers opens, and the seconds that it takes to find them."""
    specs, _ = MODELS["7B"]
    tensors = {f"{m}.{s.name}": StoredTensor(s.shape, torch.float32, True, s.tp_dim) for s in specs for m in MOMENTS}
    index, (dp, tp, shard) = TensorIndex(tensors, *WRITTEN), read
    reader = Shards(Layout(tuple(range(dp * tp)), dp, tp), shard)
    counts, seconds = [], []
    for rank in range(0, dp * tp, 37):
        start = time.perf_counter()
        boxes = {f"{m}.{s.name}": reader.box(s, rank) for s in specs for m in MOMENTS}
        counts.append(len({piece.place for name, box in boxes.items() for piece in index.pieces(name, box)}))
        seconds.append(time.perf_counter() - start)
    return max(counts), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stretch", type=int, default=4, help="steps")
    args = parser.parse_args()
    stretch = args.stretch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_assets(folder, chars=False)
        (folder / "reward.py").write_text(
            "def score(completions, **_):\n    return [len(c) % 7 for c in completions]\n"
        )
        config = {
            "flow": "grpo",
            "model": ".",
            "data": {"files": "prompts.jsonl", "batch": 8},
            "reward": "reward.py:score",
            "rollout": {"n": 8, "max_tokens": 64, "min_tokens": 64},
            "steps": 2 * stretch * (args.rounds + 1),
            "checkpoint": {"every": 2 * stretch, "keep": 2},
            "workers": 2,
            "run_dir": str(folder / "run"),
        }
        (folder / "run.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "distflow", "run", str(folder / "run.yaml")]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        size = sum(p.stat().st_size for p in (folder / "run" / "checkpoints").glob("step_*/*/tensors/*")) / 2
    ends = {int(row["step"]): row["time"] for row in rows}
    marks = range(2 * stretch, len(rows) + 1, stretch)  # after the first round, which warms up
    seconds = [ends[b] - ends[a] for a, b in pairwise(marks)]
    with_one, without = seconds[0::2], seconds[1::2]
    added = statistics.median(a - b for a, b in zip(with_one, without, strict=False))
    cpu_s = [sum(row["perf/cpu_s"] for row in rows[a:b]) for a, b in pairwise(marks)]
    added_cpu_s = statistics.median(a - b for a, b in zip(cpu_s[0::2], cpu_s[1::2], strict=False))
    step = statistics.median(without) / stretch
    print(f"{stretch} steps while a checkpoint is written: {statistics.median(with_one):.3f} s")
    print(f"{stretch} steps without: {stretch * step:.3f} s")
    result = {
        "step_s": step,
        "save_adds_s": added,
        "overhead_frac": added / stretch / step,
        "overhead_frac_cpu": added_cpu_s / statistics.median(cpu_s[1::2]),  # of both workers: less noise
        "overhead_if_every_50": added / 50 / step,
        "mib": size / 2**20,
        "rounds": len(with_one),
    }
    for name, read in READ.items():
        result[f"opened_{name}"], result[f"find_s_{name}"] = files_opened(read)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
