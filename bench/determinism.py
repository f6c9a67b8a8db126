"""The same run again and again on a busy machine: weights and curves have to be equal to the bit.

    python bench/determinism.py [--runs 60] [--only grpo,ppo]

Small runs of several algorithms, two workers each, three runs at a time, beside load on every core. Runs of one
algorithm are compared by the final weights of all roles, and by every metric of every step but timings. Some runs are
fresh processes that compile their kernels, or load them from the cache; the others are forks of one that has done so.
The last line is one JSON object.
"""

import argparse
import hashlib
import json
import os
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="in all")
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="some of the algorithms")
    args = parser.parse_args()
    algorithms = args.only.split(",")
    # The server that runs are forks of finds its modules by this.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    sys.path.append(str(TESTS))
    began = time.monotonic()
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
        "algorithms": rows,
        "s": round(time.monotonic() - began),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
