"""Rollouts: 256 prompts of 16–64 tokens, 128 new tokens each, a tiny Qwen2 in float32; one process with 2 threads.

    python bench/rollout.py [--rounds 5] [--only ours,hf,vllm] [--peers DIR] [--model DIR] [--prompts 256] [--ragged]

Each engine is a process of its own, warm before it is measured; they take turns, round after round:
  ours    distflow's built-in engine; it also gives the log-prob of every token
  hf      Hugging Face `generate`, dynamic cache, prompts as they come, padded left, in batches of the best size (tried
          while it warms up)
  hf-sorted    the same, helped: prompts of one length together
  vllm    vLLM for CPU, eager, in the environment DIR/vllm; absent if that is not there
  vllm-compiled    the same, compiled
  limit   what this machine's arithmetic and memory allow, see `Limit`
With `--model` another model than the tiny one. With `--ragged` each response has its own length, lognormal with σ 1
and half of --new-tokens in the middle, at most four times that: real responses end when they end.
Tokens are real ones. Medians of the rounds; the last line is one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assets import make_model, matrices
from serve import Served, keep_stdout_for_answers, serve

PROMPTS, SHORTEST, LONGEST, NEW, VOCAB = 256, 16, 64, 128, 1024
THREADS = 2
ALL = ("ours", "hf", "hf-sorted", "vllm", "vllm-compiled")
BATCHES = (32, 64, 128, 256)  # that are tried for Hugging Face
HERE = Path(__file__).resolve().parent
Work = dict[str, Any]


# ---------------------------------------------------------------------------------------------- the engines


def ours(model: str, work: Work) -> None:
    from transformers import AutoModelForCausalLM

    from distflow.model import attention
    from distflow.model.llama_family import fused_weights
    from distflow.model.source import kv_bytes
    from distflow.rollout.builtin.generator import CacheLimits, Generator
    from distflow.rollout.builtin.weight_buffers import empty_weights
    from distflow.rollout.engine import Request, SamplingParams
    from distflow.run.process import keep_freed_memory

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention.NAME)
    lm.eval().requires_grad_(False)
    # As in a worker: weights in memory of their own (those in a file are badly aligned), freed memory is kept.
    keep_freed_memory()
    shapes = {name: tuple(p.shape) for name, p in lm.named_parameters()}
    tensors = empty_weights(shapes, fused_weights(lm), torch.float32, torch.device("cpu"))
    for name, p in lm.named_parameters():
        p.data = tensors[name].copy_(p.data)
    limits = CacheLimits(kv_bytes(lm.config, torch.float32, 1), 2 << 30, work["at_once"])
    generator = Generator(lm, limits, torch.device("cpu"), max_batches=THREADS)
    prompts, params = [tuple(p) for p in work["prompts"]], [SamplingParams(n) for n in work["lengths"]]
    calls = 0

    def generate(n: int) -> Work:
        nonlocal calls
        calls += 1
        for i, prompt in enumerate(prompts[:n]):
            generator.add_request(Request(i, prompt, params[i], seed=calls))
        tokens = 0
        while generator.has_unfinished:
            tokens += sum(len(c.tokens) for c in generator.step())
        return {"tokens": tokens}

    generate(work["warm_up"])
    generate(work["warm_up"])
    about = f"distflow {version('distflow-rl')}, transformers {version('transformers')}, torch {torch.__version__}"
    serve(lambda: generate(len(prompts)), {"version": about})


def hf(model: str, work: Work, ordered: bool = False) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    lm.generation_config.eos_token_id = None
    prompts = list(zip(work["prompts"], work["lengths"], strict=True))
    if ordered:
        prompts.sort(key=lambda pair: len(pair[0]))

    @torch.inference_mode()
    def batch(pairs: list[tuple[list[int], int]]) -> int:
        some, lengths = [p for p, _ in pairs], [n for _, n in pairs]
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in some])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in some])
        new = max(lengths)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        limits = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        out: Tensor = lm.generate(input_ids=ids, attention_mask=mask, use_cache=True, **sampling, **limits)
        assert out.shape[1] == longest + new
        return sum(lengths)

    def everything(size: int) -> int:
        return sum(batch(prompts[i : i + size]) for i in range(0, len(prompts), size))

    def took(size: int) -> float:
        began = time.perf_counter()
        everything(size)
        return time.perf_counter() - began

    batch(prompts[:16])
    tries = [{size: took(size) for size in work["hf_batches"]} for _ in range(2)]  # others on the machine disturb
    size = min(work["hf_batches"], key=lambda s: min(t[s] for t in tries))

    def generate() -> Work:
        return {"tokens": everything(size)}

    about = f"transformers {version('transformers')}, torch {torch.__version__}"
    serve(generate, {"version": about, "setting": f"batches of {size}"})


class Limit:
    """Seconds of an engine that does nothing but `torch.mm` and reading of keys. Who multiplies faster can beat it.

    Every token passes through every matrix of the model: the time `torch.mm` takes for them alone, at the shapes they
    have (all prompt tokens at once; then all sequences in flight, once per new token), on this machine's two threads.
    Each layer has its own weights here as well, so they come from whichever cache they come from in reality. To that
    comes attention: each new token reads the keys and values of its sequence, which do not fit into a cache, so their
    bytes over the bandwidth at which this machine reads memory. Nothing is counted for sampling, norms, attention's
    own arithmetic, reading of prompts' keys, or Python.
    """

    def __init__(self, model: str, work: Work) -> None:
        shapes = matrices(Path(model))
        self.body = [torch.randn(n_out, n_in) for n_in, n_out in shapes.body]
        self.head = torch.randn(shapes.head[1], shapes.head[0])
        self.lengths = [len(p) for p in work["prompts"]]
        self.new = round(sum(work["lengths"]) / len(self.lengths))
        self.flying = len(self.lengths)
        rows = sum(self.lengths)
        self.inputs = {n: torch.randn(rows, n) for n in {w.shape[1] for w in self.body}}
        self.outputs = {w.shape[0]: torch.zeros(rows, w.shape[0]) for w in [*self.body, self.head]}
        # The first new token comes from the prompt; the one after attends to the prompt and itself; and so on.
        seen = sum(n * (self.new - 1) + (self.new - 1) * self.new // 2 for n in self.lengths)
        self.kv_bytes = seen * 2 * shapes.layers * shapes.kv * 4
        self.memory = torch.ones(64 << 20)  # 256 MiB: more than the caches

    def __call__(self) -> Work:
        prompts = _fastest(lambda: self._pass(sum(self.lengths)), 4)
        decode = _fastest(lambda: self._pass(self.flying), 12) * (self.new - 1)
        reading = min(_fastest(self.memory.sum, 3), _fastest(lambda: torch.dot(self.memory, self.memory), 3) / 2)
        bandwidth = self.memory.nbytes / reading
        attention = self.kv_bytes / bandwidth
        flops = 2 * self.flying * (self.new - 1) * sum(w.numel() for w in [*self.body, self.head])
        return {
            "limit_s": prompts + decode + attention,
            "prompts_s": prompts,
            "decode_matmul_s": decode,
            "decode_memory_s": attention,
            "decode_gflops": flops / decode / 1e9,
            "read_gib_per_s": bandwidth / (1 << 30),
        }

    def _pass(self, rows: int) -> None:
        for weight, n in [*((w, rows) for w in self.body), (self.head, self.flying)]:
            n_out, n_in = weight.shape
            torch.mm(self.inputs[n_in][:n], weight.T, out=self.outputs[n_out][:n])


def _fastest(work: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def limit(model: str, work: Work) -> None:
    serve(Limit(model, work), {"version": f"torch {torch.__version__}"})


ENGINES: dict[str, Callable[[str, Work], None]] = {
    "ours": ours,
    "hf": hf,
    "hf-sorted": partial(hf, ordered=True),
    "limit": limit,
}


# ---------------------------------------------------------------------------------------------- the whole run


def commands(peers: Path, only: list[str], model: Path, work: Path) -> dict[str, list[str] | None]:
    """Engine → how to start it; None where it is not installed."""
    found: dict[str, list[str] | None] = {}
    for name in dict.fromkeys(["limit", *only]):
        if name in ENGINES:
            found[name] = [sys.executable, __file__, "--engine", name, str(model), str(work)]
            continue
        python = peers.absolute() / "vllm" / "bin" / "python"
        script = str(HERE / "peers" / "vllm_generate.py")
        more = ["--compiled"] if name == "vllm-compiled" else []
        found[name] = [str(python), script, str(model), str(work), *more] if python.exists() else None
    return found


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Work]], dict[str, Work]]:
    """Rounds of each engine that works here, and what each says of itself."""
    rng = random.Random(0)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(args.prompts)]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
    model, file = args.model.absolute() if args.model else folder / "model", folder / "work.json"
    if not args.model:
        make_model(model, VOCAB)
    work = {
        "prompts": prompts,
        "lengths": response_lengths(args.prompts, args.new_tokens, args.ragged),
        "at_once": PROMPTS,
        "warm_up": min(32, args.prompts),
        "hf_batches": args.hf_batches,
    }
    tokens = sum(work["lengths"])
    file.write_text(json.dumps(work))
    # numpy's threads as `distflow run` sets them
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    engines: dict[str, Served] = {}
    about: dict[str, Work] = {}
    runs: dict[str, list[Work]] = {}
    try:
        for name, command in commands(args.peers, args.only.split(","), model, file).items():
            if command is None:
                print(f"  {name}: not installed", flush=True)
                continue
            began = time.perf_counter()
            engine = engines[name] = Served(name, command, env, folder)
            answer = engine.ready()
            if answer is not None:
                about[name], runs[name] = answer, []
                print(f"  {name}: {_words(answer)}, warm after {time.perf_counter() - began:.0f} s", flush=True)
        for i in range(args.rounds):
            for name in list(runs):
                row = engines[name].work()
                if row is None:
                    del runs[name]
                    continue
                if name != "limit" and row["tokens"] != tokens:
                    raise SystemExit(f"{name} made {row['tokens']} tokens instead of {tokens}")
                runs[name].append(row)
            told_all = "  ".join(f"{n} {r[-1].get('limit_s', r[-1]['s']):.2f} s" for n, r in runs.items())
            print(f"  round {i + 1}: {told_all}", flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    return runs, about


def response_lengths(prompts: int, tokens: int, ragged: bool) -> list[int]:
    rng = random.Random(1)
    if not ragged:
        return [tokens] * prompts
    return [max(1, min(4 * tokens, round(tokens / 2 * rng.lognormvariate(0.0, 1.0)))) for _ in range(prompts)]


def _words(about: Work) -> str:
    return ", ".join(str(v) for v in about.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(ALL), help="some of the engines, separated by commas")
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of the peers' environments")
    parser.add_argument("--new-tokens", type=int, default=NEW, help="fewer, to try things out")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--hf-batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        name, model, work = args.engine
        keep_stdout_for_answers()
        torch.set_num_threads(THREADS)
        ENGINES[name](model, json.loads(Path(work).read_text()))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs, about = measure(args, Path(folder))

    tokens = sum(response_lengths(args.prompts, args.new_tokens, args.ragged))
    rows = {n: r for n, r in runs.items() if r and n != "limit"}
    wall = {n: round(tokens / statistics.median(row["s"] for row in r), 1) for n, r in rows.items()}
    cpu = {n: round(tokens / statistics.median(row["cpu_s"] for row in r), 1) for n, r in rows.items()}
    for n in rows:
        print(f"{n:14s} {wall[n]:9,.0f} tokens/s  {cpu[n]:9,.0f} tokens per CPU second")

    def versus(speeds: dict[str, float], peer: str) -> float | None:
        return round(speeds["ours"] / speeds[peer], 3) if {"ours", peer} <= set(speeds) else None

    # A round's limit was measured beside a round's rollout: the machine's speed drifts.
    near = [a["limit_s"] / b["s"] for a, b in zip(runs.get("limit", []), rows.get("ours", []), strict=False)]
    result = {
        **{f"vs_{n.replace('-', '_')}": versus(wall, n) for n in ALL[1:]},
        **{f"vs_{n.replace('-', '_')}_cpu": versus(cpu, n) for n in ALL[1:]},
        "limit_frac": round(statistics.median(near), 3) if near else None,
        "tokens_per_s": {n: wall.get(n) for n in ALL},
        "tokens_per_cpu_s": {n: cpu.get(n) for n in ALL},
        "rounds": args.rounds,
        "threads": THREADS,
        "versions": {n: _words(a) for n, a in about.items()},
        "limit": runs.get("limit"),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
