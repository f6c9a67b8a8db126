"""How long a worker takes to derive its weight hand-over: who sends it what, and what it sends to whom.

    python bench/handover.py [--workers 1024 8192]

Qwen2.5 7B and 72B from train dp N to generate dp N/tp × tp (2 and 8), on hosts of 8. Nothing is sent: it is pure code,
which a run executes once. The last line is one JSON object: CPU seconds by model and N, of the slowest of some ranks.
"""

import argparse
import json
import time

import torch

from distflow.engine.hand_over import HandOver
from distflow.engine.weights import Shards, Spec
from distflow.plan import Layout
from distflow.plan.topology import Topology

PER_HOST = 8


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1024, 8192])
    sizes = parser.parse_args().workers
    result = {name: {n: handover_s(name, n) for n in sizes} for name in MODELS}
    for name, times in result.items():
        print(f"hand-over of {name}, derived: " + ", ".join(f"{s} s at {n:,}" for n, s in times.items()))
    print(json.dumps({"handover_s": result}))


if __name__ == "__main__":
    main()
