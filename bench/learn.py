"""Trains every RL algorithm, and options of them, on the demo's task, from the same warm-up: held-out accuracy before
and after.

`python bench/learn.py [--steps 40] [--only grpo,ppo] [--seed 0]`. About half a minute each on two cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TASK, RUNS = ROOT / "examples" / "sorting", ROOT / "runs" / "sorting"
ACCURACY = "val/all/score"
# Overrides of the demo's GRPO config, by flow.
ALGORITHMS: dict[str, list[str]] = {
    "ppo": ["critic.lr=2.0e-3", "algo.mini_batches=2"],
    "grpo": [],
    "dr_grpo": [],
    "rloo": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
    "remax": [],
    "dapo": [],
    "gspo": ["algo.mini_batches=2"],
    "dcpo": ["algo.mini_batches=2"],
    "cispo": ["algo.mini_batches=2"],
    "cpgd": ["algo.mini_batches=2"],
    "gpg": [],
    "opo": [],
    "sapo": ["algo.mini_batches=2"],
    "gmpo": ["algo.mini_batches=2"],
    "dppo": ["algo.mini_batches=2"],
    "vespo": ["algo.mini_batches=2"],
    "clip_cov": ["algo.mini_batches=2"],
    "kl_cov": ["algo.mini_batches=2"],
    "otb": [],
    "rae": [],
    "max_at_k": [],
    "gdpo": ["reward=[reward.py:compute_score,reward.py:same_digits]", "eval.reward=reward.py:compute_score"],
}
# And of options that are no flows of their own.
OPTIONS: dict[str, list[str]] = {
    "max_rl": ["flow=grpo", "algo.scale=mean"],
    "luspo": ["flow=gspo", "algo.aggregate=seq-mean-token-sum", "algo.mini_batches=2"],
    "pass_at_k": ["flow=max_at_k", "algo.baseline=mean"],
    "mask_truncated": ["flow=grpo", "algo.mask_truncated=true"],
    "mask_off_policy": ["flow=grpo", "algo.mini_batches=2", "algo.mask_off_policy=0.01"],
    "top_entropy": ["flow=grpo", "algo.top_entropy=0.5"],
    "entropy_target": ["flow=grpo", "algo.entropy_target=0.3"],
    "kl_unbiased": ["flow=grpo", "algo.mini_batches=2", "algo.kl=0.01", "algo.kl_unbiased=true"],
    "kl_refreshed": ["flow=grpo", "algo.kl=0.01", "algo.kl_reference=ema", "train.ema=0.0", "train.ema_every=5"],
    "rejection": [
        *("flow=grpo", "algo.mini_batches=2", "algo.rollout_correction=icepop-token"),
        "algo.rollout_rejection=mean-k1",
    ],
}


def distflow(*words: str) -> None:
    command = [sys.executable, "-m", "distflow", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def warm_up() -> None:
    shutil.rmtree(RUNS, ignore_errors=True)
    subprocess.run([sys.executable, str(TASK / "data.py"), str(RUNS)], check=True)
    distflow("run", str(TASK / "warmup.yaml"))
    distflow("export", str(RUNS / "warmup"), str(RUNS / "model"))


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Returns the values of each metric, step by step."""
    metrics: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        for name, value in json.loads(line).items():
            if value is not None:
                metrics.setdefault(name, []).append(value)
    return metrics


def train(algorithm: str, steps: int, seed: int, workers: int) -> dict[str, object]:
    run = RUNS / algorithm
    overrides = [f"name={algorithm}", f"steps={steps}", f"seed={seed}", f"run_dir={run}", f"workers={workers}"]
    overrides += OPTIONS.get(algorithm) or [f"flow={algorithm}", *ALGORITHMS[algorithm]]
    began = time.monotonic()
    distflow("run", str(TASK / "grpo.yaml"), *overrides, "eval.every=20")
    metrics = read_metrics(run / "metrics.jsonl")
    accuracy = metrics[ACCURACY]
    result: dict[str, object] = {
        "algorithm": algorithm,
        "steps": steps,
        "before": accuracy[0],
        "after": accuracy[-1],
        "s": round(time.monotonic() - began, 1),
    }
    for name in ("critic/vf_loss", "critic/explained_variance"):
        if values := metrics.get(name):
            early, late = values[:5], values[-max(5, len(values) // 4) :]  # single steps are noisy
            result[name.partition("/")[2]] = [round(sum(x) / len(x), 4) for x in (early, late)]
    if discarded := metrics.get("sampling/discarded"):
        result["discarded"] = int(sum(discarded))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default=",".join((*ALGORITHMS, *OPTIONS)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep-model", action="store_true", help="reuse the warm-up of an earlier run")
    args = parser.parse_args()
    if not (args.keep_model and (RUNS / "model").is_dir()):
        warm_up()
    rows = []
    print(f"{'':22} {'steps':>5} {'before':>7} {'after':>7}")
    for algorithm in args.only.split(","):
        row = train(algorithm, args.steps, args.seed, args.workers)
        rows.append(row)
        rest = "  ".join(f"{k} {v}" for k, v in row.items() if k not in ("algorithm", "steps", "before", "after", "s"))
        print(
            f"{algorithm:22} {row['steps']:5} {row['before']:7.1%} {row['after']:7.1%}  {row['s']} s  {rest}",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
