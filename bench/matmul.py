"""How fast `torch.mm` multiplies the matrices of a training pass here, in so many processes at once, and nothing else.

Who multiplies faster than that reaches more than all of it.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from assets import Matrices, matrices
from workers import run_workers


def training_flops(shapes: Matrices, sequences: int, prompt: float, response: float) -> float:
    """Forward and backward passes of a step over all workers: a multiplication and an addition for every element of
    a matrix and token, forward, and twice that backward. Each sequence is its prompt and its response but for the last
    token. Attention is causal: a token looks at half of the others on average. From mean lengths: where these vary,
    the sum of their squares is larger, so attention (a few per cent of all) is then counted too low."""
    length = prompt + response - 1
    body = sum(n_in * n_out for n_in, n_out in shapes.body)
    head = shapes.head[0] * shapes.head[1]
    attention = shapes.layers * 2 * length * length * shapes.hidden
    return 3 * sequences * (2 * body * length + 2 * head * response + attention)


def worker(out: str, folder: str, tokens: int, responses: int, seconds: float) -> None:
    """One of the processes: `torch.mm` at the shapes of the model with the tokens of one worker, forward, for the
    input's gradient, and for the weight's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = matrices(Path(folder))
    calls = [*((n_in, n_out, tokens) for n_in, n_out in shapes.layer * shapes.layers), (*shapes.head, responses)]
    widths = {n for n_in, n_out, _ in calls for n in (n_in, n_out)}
    rows = {n: torch.randn(max(tokens, responses), n) for n in widths}
    made = {n: torch.empty(max(tokens, responses), n) for n in widths}
    weights = [torch.randn(n_out, n_in) for n_in, n_out, _ in calls]
    grads = [torch.empty_like(w) for w in weights]

    def everything() -> None:
        for (n_in, n_out, count), weight, grad in zip(calls, weights, grads, strict=True):
            x, y = rows[n_in][:count], rows[n_out][:count]
            torch.mm(x, weight.T, out=made[n_out][:count])
            torch.mm(y, weight, out=made[n_in][:count])
            torch.mm(y.T, x, out=grad)

    everything()
    dist.barrier()
    passes, began = 0, time.perf_counter()
    while passes == 0 or time.perf_counter() - began < seconds:
        everything()
        passes += 1
    speed = passes * sum(6 * a * b * n for a, b, n in calls) / (time.perf_counter() - began)
    total = torch.tensor([speed / 1e9], dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"gflops": float(total) / dist.get_world_size()}))
    dist.barrier()
    dist.destroy_process_group()


def fraction(
    assets: Path, workers: int, sequences: int, prompt: float, response: float, update_s: float, seconds: float
) -> tuple[float, float]:
    """How much of that limit an update reaches which took so long, and the limit in GFLOP/s of one process."""
    tokens, responses = round(sequences * (prompt + response - 1) / workers), round(sequences * response / workers)
    gflops = run_workers(__file__, workers, str(assets), str(tokens), str(responses), str(seconds))["gflops"]
    flops = training_flops(matrices(assets), sequences, prompt, response)
    return flops / (gflops * 1e9 * workers * update_s), gflops


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("assets")
    parser.add_argument("tokens", type=int)
    parser.add_argument("responses", type=int)
    parser.add_argument("seconds", type=float)
    args = parser.parse_args()
    worker(args.worker, args.assets, args.tokens, args.responses, args.seconds)
