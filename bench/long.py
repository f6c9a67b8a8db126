"""One long sequence, divided over 1, 2 and 4 ranks: the gradient, memory per worker, and time.

    python bench/long.py
    python bench/long.py --tokens 8192

A small Qwen2 in float32 with a sequence of which half is the response; all workers are here, with a thread each.
`grad_error` is the largest difference of a gradient from that of one worker, |g − g₁| / |g₁| over all parameters.
Memory is the peak of a worker's update less what it has before; a ratio of 1/sp is the best there is. Workers share the
cores of the host, so time says what the division costs more than what it gains. The last line is one JSON object.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from distflow.algo.losses import policy
from distflow.batch.batch import Batch, Ragged
from distflow.batch.context import Context
from distflow.config.schema import TrainConfig
from distflow.model.source import Source
from distflow.model.tokenizer import train_tokenizer
from distflow.observe.metrics import StepMetrics
from distflow.plan.layout import Layout
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from distflow.train.update_spec import UpdateSpec
from distflow.weights.shards import slices
from spawn import spawn

VOCABULARY = 512
_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 20,
}


def sample(tokens: int) -> Batch:
    draw = np.random.default_rng(0)

    def row(count: int) -> Tensor:
        return torch.from_numpy(draw.integers(0, VOCABULARY, count))

    columns: dict[str, Tensor | Ragged | list[Any]] = {
        "prompt_tokens": Ragged.of([row(tokens // 2)]),
        "response_tokens": Ragged.of([row(tokens - tokens // 2)]),
        "advantage": torch.ones(1),
    }
    return Batch(np.arange(1), np.arange(1), columns)


def memory_mib(key: str) -> float:
    """VmRSS now, or VmHWM, its peak since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(key))


def measure(rank: int, sp: int, folder: Path, tokens: int) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)  # so that what is freed is given back, also in smaller blocks
    layout = Layout(tuple(range(sp)), 1, 1, sp)
    mesh = DeviceMesh("cpu", torch.arange(sp).view(sp, 1), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("dp") if sp > 1 else None
    source = Source("long", AutoConfig.for_model("qwen2", **SHAPE), train_tokenizer(iter(["a b"]), 0), folder)
    trainer = Trainer("actor", source, RankMesh(layout, mesh, rank, group), TrainerOptions(TrainConfig(clip_grad=0.0)))
    grads: list[Tensor] = []

    def keep() -> None:
        grads[:] = [s.grad.detach().clone() for s in trainer.optimized if s.grad is not None]

    assert trainer.optimizer is not None
    trainer.optimizer.step = keep  # type: ignore[method-assign, assignment]
    ctx = Context(0, rank, sp, layout, 0, StepMetrics(), folder, np.arange(1))
    trainer.update(sample(64 * sp), UpdateSpec(policy, {}, "token-mean", 1, 1), ctx)  # warms up
    before = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start, cpu = time.perf_counter(), time.process_time()
    trainer.update(sample(tokens), UpdateSpec(policy, {}, "token-mean", 1, 1), ctx)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    parts = {
        spec.name: (slices(trainer.shards.box(spec, rank)), grad.numpy())
        for (spec, _), grad in zip(trainer.trained, grads, strict=True)
    }
    return {"mib": memory_mib("VmHWM") - before, "seconds": seconds, "cpu_s": cpu, "parts": parts}


def joined(workers: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """Returns the whole gradient in one row."""
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for worker in workers:
        for name, (box, grad) in worker["parts"].items():
            whole[name][box] = torch.from_numpy(grad)
    return torch.cat([grad.flatten() for grad in whole.values()]).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    tokens = parser.parse_args().tokens
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SHAPE))
        model.save_pretrained(folder)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        first = torch.zeros(0)
        print(f"one sequence of {tokens:,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
        print("sp   MiB per worker   seconds   CPU seconds of all   gradient differs by")
        for sp in (1, 2, 4):
            workers = spawn(sp, measure, sp, folder, tokens, timeout_s=900)
            gradient = joined(workers, shapes)
            first = gradient if sp == 1 else first
            rows[sp] = {
                "mib": round(max(w["mib"] for w in workers), 1),
                "seconds": round(max(w["seconds"] for w in workers), 1),
                "cpu_s": round(sum(w["cpu_s"] for w in workers), 1),
                "grad_error": float((gradient - first).norm() / first.norm()),
            }
            row = rows[sp]
            print(
                f"{sp:2}{row['mib']:17.0f}{row['seconds']:10.1f}{row['cpu_s']:21.1f}{row['grad_error']:22.1e}",
                flush=True,
            )
    result = {
        "tokens": tokens,
        "memory_ratio_sp2": round(rows[2]["mib"] / rows[1]["mib"], 3),
        "memory_ratio_sp4": round(rows[4]["mib"] / rows[1]["mib"], 3),
        "grad_error": max(row["grad_error"] for row in rows.values()),
        "sp": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
