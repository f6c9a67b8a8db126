"""The same run again and again on a busy machine: weights and curves have to be equal to the bit; and what that costs.

    python bench/determinism.py [--runs 60] [--only grpo,ppo] [--rounds 80]

Small runs of several algorithms, two workers each, three runs at a time, beside load on every core. Runs of one
algorithm are compared by the final weights of all roles, and by every metric of every step but timings. Some runs are
fresh processes that compile their kernels, or load them from the cache; the others are forks of one that has done so.

The cost is measured on a larger model (hidden 256, 4 layers, vocabulary 1024) in two processes of one thread, in turn
with the kernels as they are and with kernels whose bits depend on where memory is free (see `former_kernels`). The last
line is one JSON object.
"""

import argparse
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
WORKERS, STEPS, AT_ONCE, LIMIT_S, VOCAB = 2, 8, 3, 600, 1024
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "data": {"files": "data.jsonl", "batch": 8},
    "steps": STEPS,
    "workers": WORKERS,
    "algo": {"kl": 0.01},
    "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
    "rollout": {"n": 4, "max_tokens": 12},
    "train": {"lr": 1e-3, "warmup": 3, "schedule": "linear"},
    "reward": "reward.py:any_digit",
    "eval": {"files": "data.jsonl", "every": 3, "limit": 4},
    "checkpoint": {"every": 4, "keep": 1},
    "wait_limit_s": 300,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"flow": "ppo", "algo": {"mini_batches": 2}, "critic": {"lr": 1e-2}},
    "dapo": {"flow": "dapo", "algo": {"max_gen_batches": 3}},
    "lora": {"train": {"lr": 1e-2, "lora": {"rank": 4}}, "algo": {}},
    "sft": {"flow": "sft", "algo": {}, "data": {"files": "pairs.jsonl", "batch": 8}},
}
FRESH = "ppo"  # it uses most kernels
REWARD = """
def any_digit(solution_str):
    return float(any(c in "1234" for c in solution_str))
"""
TIMINGS = ("time", "timing_", "perf/")
BURN = """
import os, random, sys, time

parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and os.getppid() == parent:
    until = time.monotonic() + random.uniform(0, 0.2)
    while time.monotonic() < until:
        pass
    time.sleep(random.uniform(0, 0.05))
"""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    weights: dict[str, str]  # role and tensor → a hash of its bytes
    curves: list[dict[str, Any]]  # metrics of each line of the log, without timings

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.weights, self.curves], sort_keys=True).encode()).hexdigest()

    def against(self, other: "Outcome") -> dict[str, Any]:
        """Returns the first step with another metric, and how many tensors differ at the end."""
        result: dict[str, Any] = {"tensors": sum(self.weights[k] != other.weights.get(k) for k in self.weights)}
        for mine, theirs in zip(self.curves, other.curves, strict=False):
            if differing := {k: [theirs.get(k), v] for k, v in mine.items() if theirs.get(k) != v}:
                return result | {"step": mine["step"], "metrics": differing}
        return result


def read(run: Path) -> Outcome:
    from distflow.checkpoint.store import load_full_tensors
    from distflow.run_folder import checkpoint_dir

    weights = {}
    for role in sorted(p for p in checkpoint_dir(run / "checkpoints", STEPS).iterdir() if p.is_dir()):
        if (role / "tensors").is_dir():
            for name, tensor in load_full_tensors(role).items():
                digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
                weights[f"{role.name}/{name}"] = digest[:16]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in rows]
    assert weights
    assert len(curves) >= STEPS
    return Outcome(weights, curves)


def prepare(folder: Path) -> None:
    prompts = [{"prompt": f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?"} for i in range(20)]
    pairs = [row | {"response": f"it is {i + i * i % 17}"} for i, row in enumerate(prompts)]
    for name, rows in (("data", prompts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def run_forked(folder: Path, algorithm: str, number: int) -> Outcome:
    """Runs an algorithm with forked workers."""
    from warm import distflow_run

    path = folder / f"{algorithm}{number}.yaml"
    path.write_text(json.dumps(CONFIG | {"run_dir": str(folder / path.stem)} | ALGORITHMS[algorithm]))
    ended = distflow_run(path, workers=WORKERS, timeout_s=LIMIT_S)
    if any(ended.codes):
        raise SystemExit(f"{path.stem} ended with {ended.codes}\n{ended.err}")
    return read(folder / path.stem)


def run_fresh(folder: Path, algorithm: str, number: int) -> Outcome:
    """Runs an algorithm as a user starts it; the first of these runs finds no compiled kernels."""
    path = folder / f"{algorithm}-fresh{number}.yaml"
    path.write_text(json.dumps(CONFIG | {"run_dir": str(folder / path.stem)} | ALGORITHMS[algorithm]))
    launch(path, {"NUMBA_CACHE_DIR": str(folder / "kernels")})
    return read(folder / path.stem)


def launch(config: Path, more: dict[str, str]) -> None:
    command = [sys.executable, "-m", "distflow", "run", str(config)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{config.stem} ended with {done.returncode}\n{done.stdout}{done.stderr}")


@contextmanager
def load(limit_s: float) -> Iterator[None]:
    """Loads each core now and then, until the block or the time is over."""
    command = [sys.executable, "-c", BURN, str(limit_s)]
    burners = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in burners:
            process.kill()
            process.wait()


def compare(folder: Path, algorithms: list[str], runs: int) -> dict[str, dict[str, Any]]:
    """Returns for each algorithm how many runs there were, how many differ from the rest, and where."""
    prepare(folder)
    plan = list(islice(cycle(algorithms), runs))
    fresh = 2 if FRESH in algorithms and runs >= 2 * len(algorithms) else 0
    for _ in range(fresh):
        plan.remove(FRESH)
    outcomes: dict[str, list[Outcome]] = {a: [] for a in algorithms}
    with load(3600), ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [(a, pool.submit(run_forked, folder, a, i)) for i, a in enumerate(plan)]
        try:
            for i in range(fresh):  # one after the other, beside the rest
                outcomes[FRESH].append(run_fresh(folder, FRESH, i))
            for algorithm, job in jobs:
                outcomes[algorithm].append(job.result())
        finally:
            pool.shutdown(cancel_futures=True)  # if one has failed
    rows = {}
    for algorithm, ran in outcomes.items():
        usual, count = Counter(o.key for o in ran).most_common(1)[0]
        model = next(o for o in ran if o.key == usual)
        others = [o.against(model) for o in ran if o.key != usual]
        metrics = len({k for row in model.curves for k in row})
        about = {"tensors": len(model.weights), "metrics": metrics, "steps": STEPS}
        rows[algorithm] = {"runs": len(ran), "different": len(ran) - count, **about, "what": others}
    return rows


# ---------------------------------------------------------------------------------------------- what it costs

ONE_LOOP = """\
        for start in range(0, vocabulary, SUM):
            some = _F(0)
            for c in range(start, min(start + SUM, vocabulary)):
                odds = exp(row[c] - peak)
                some += odds
                x = _U(columns[c] + one)
                x = _U(_U(x ^ _U(x >> _U(16))) * _U(0x21F0AAAD)) ^ other
                x = _U(_U(x ^ _U(x >> _U(15))) * _U(0x735A2D97))
                uniform = (_F(_I(x >> _U(9))) + _F(0.5)) * _F(2.0**-23)
                arrivals[c] = odds / log(uniform)
            total += some
"""


def former_kernels() -> dict[str, str]:
    """Returns the files of kernels without the fix: one loop both sums and stores, and they call each other without
    inlining."""
    from distflow.cpu import kernels

    files = {path.name: path.read_text() for path in Path(kernels.__file__).parent.glob("*.py")}
    text = files["layers.py"]
    start = text.index("        for start in range", text.index("def gumbel_sample("))
    files["layers.py"] = text[:start] + ONE_LOOP + text[text.index("        best, first", start) :]
    assert files["compiled.py"].count("forceinline=inline") == 1
    files["compiled.py"] = files["compiled.py"].replace("forceinline=inline", "forceinline=False")
    return {name: text.replace("distflow.cpu.kernels.", "former.") for name, text in files.items()}


def cost_worker(out: str, folder: str, rounds: int) -> None:
    """One of two processes that do the work of a step in turn with today's kernels and with the former ones."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from distflow import cpu
    from distflow.batch.response_mask import ModelTokens
    from distflow.cpu import kernels
    from distflow.cpu.train_ops import use_cpu_modules
    from distflow.model import attention
    from distflow.model.source import kv_bytes
    from distflow.rollout.builtin.generator import CacheLimits, Generator
    from distflow.rollout.engine import Request, SamplingParams
    from distflow.run.process import keep_freed_memory
    from distflow.train.heads import LogprobHead
    from distflow.train.packing import Pack

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    sys.path.insert(0, folder)
    old = importlib.import_module("former")
    policy, trained = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME)
        for _ in range(2)
    )
    policy.eval().requires_grad_(False)
    use_cpu_modules(trained)
    samples, prompt, response = 16, 16, 16
    limits = CacheLimits(kv_bytes(policy.config, torch.float32, 1), 1 << 28, samples)
    generator = Generator(policy, limits, torch.device("cpu"))
    draw, each = np.random.default_rng(0), np.arange(samples)
    prompts = [tuple(row) for row in draw.integers(2, VOCAB, (samples, prompt)).tolist()]
    length = prompt + response - 1
    tokens = torch.from_numpy(draw.integers(2, VOCAB, samples * length))
    rows = torch.arange(samples * length).view(samples, length)
    keep = rows[:, prompt - 1 :].flatten()
    pack = Pack(
        index=each,
        tokens=tokens,
        positions=torch.arange(length).repeat(samples),
        lengths=[length] * samples,
        shared=None,
        keep=keep,
        targets=torch.from_numpy(draw.integers(2, VOCAB, len(keep))),
        responses=torch.full((samples,), response),
        per_token={},
        per_sample={},
        model_tokens=ModelTokens(np.full(samples, response)),
    )
    head = LogprobHead(trained)

    params = SamplingParams(response)

    def work() -> None:
        for i, tokens in enumerate(prompts):
            generator.add_request(Request(i, tokens, params, seed=0))
        while generator.has_unfinished:
            generator.step()
        with torch.no_grad():
            head(pack, 1.0)
        logprobs, _ = head(pack, 1.0)
        logprobs.sum().backward()

    def took(chosen: ModuleType) -> tuple[float, float]:
        cpu._kernels = lambda: chosen  # type: ignore[assignment]
        wall, busy = time.perf_counter(), time.thread_time()
        work()
        return time.perf_counter() - wall, time.thread_time() - busy

    for chosen in (kernels, old) * 3:
        took(chosen)
    dist.barrier()
    ratios = []
    for i in range(rounds):
        turns = (kernels, old) if i % 2 else (old, kernels)
        spent = {chosen: took(chosen) for chosen in turns}
        ratios.append([now / before for now, before in zip(spent[kernels], spent[old], strict=True)])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ratios)
    if dist.get_rank() == 0:
        wall, busy = (statistics.median(r[k] for some in every for r in some) - 1 for k in (0, 1))
        Path(out).write_text(json.dumps({"cost_frac": round(busy, 4), "cost_wall_frac": round(wall, 4)}))
    dist.barrier()
    dist.destroy_process_group()


def cost(folder: Path, rounds: int) -> dict[str, Any]:
    """Measures by how much generation, inference and training take longer with today's kernels: medians over pairs of
    passes that follow each other. `cost_frac` is in CPU seconds, which load on the machine hardly changes."""
    from assets import make_model
    from workers import run_workers

    make_model(folder, VOCAB)
    (folder / "former").mkdir()
    for name, text in former_kernels().items():
        (folder / "former" / name).write_text(text)
    return run_workers(__file__, WORKERS, str(folder), str(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="in all")
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="some of the algorithms")
    parser.add_argument("--rounds", type=int, default=80, help="to measure the cost; 0: not at all")
    args = parser.parse_args()
    algorithms = args.only.split(",")
    # The server that runs are forks of finds its modules by this.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    sys.path.append(str(TESTS))
    began = time.monotonic()
    spent: dict[str, Any] = {}
    if args.rounds:
        with tempfile.TemporaryDirectory() as name:
            spent = cost(Path(name), args.rounds)
        print(f"cost: {spent['cost_frac']:+.2%} of CPU time, {spent['cost_wall_frac']:+.2%} of time", flush=True)
    with tempfile.TemporaryDirectory() as name:
        rows = compare(Path(name), algorithms, args.runs)
    print(f"{'':6s} {'runs':>5s} {'different':>10s} {'tensors':>8s} {'metrics':>8s} {'steps':>6s}")
    for algorithm, row in rows.items():
        numbers = f"{row['runs']:5d} {row['different']:10d} {row['tensors']:8d} {row['metrics']:8d} {row['steps']:6d}"
        print(f"{algorithm:6s} {numbers}")
        for what in row["what"]:
            print(f"       from step {what.get('step')}: {what.get('metrics')}, {what['tensors']} tensors")
    result = {
        "runs": sum(row["runs"] for row in rows.values()),
        "different": sum(row["different"] for row in rows.values()),
        **spent,
        "algorithms": rows,
        "s": round(time.monotonic() - began),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        cost_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
