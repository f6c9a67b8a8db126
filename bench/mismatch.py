"""Whole runs: how far the log-probs of the rollout are from the trainer's, in any step. On a CPU in float32: 0.

    python bench/mismatch.py [--steps 60] [--only demo,ppo,conversation,lora,stale]

Two workers each, `distflow run` as a user starts it:
  demo          examples/sorting: GRPO after a warm-up
  ppo           with a critic, two updates a step (the first is compared: after it the weights are others)
  conversation  an environment of three turns
  lora          GRPO of an adapter
  stale         one worker generates a step ahead of the other, all are killed in the middle, and the run is resumed.
                `rollout/mismatch_max` is then the difference of two weights: here the trainer's forward pass is done
                again with the checkpoint of those weights that generated
The last line is one JSON object.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SORTING = ROOT / "examples" / "sorting"
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo

FIELDS = "prompt_tokens", "response_tokens", "rollout_logprobs"


@node(writes=())
def trained(batch, ctx):
    columns = [[x.tolist() for x in batch[field]] for field in FIELDS]
    with open(ctx.folder.parent / f"{ctx.folder.name}.{ctx.rank}.jsonl", "a") as file:
        for version, *row in zip(batch["weight_version"].tolist(), *columns, strict=True):
            file.write(json.dumps([ctx.step, version, *row]) + "\\n")


class Tapped:
    def __init__(self, actor):
        self.logprobs, self._generate, self._update = actor.logprobs, actor.generate, actor.update

    def generate(self, prompts):
        self.rollout = self._generate(prompts)
        return self.rollout

    def update(self, tokens, *fields, **constants):
        trained(*(self.rollout[field] for field in (*FIELDS, "weight_version")))
        self._update(tokens, *fields, **constants)


@flow
def tapped(prompts, actor, reference, reward):
    grpo.fn(prompts, Tapped(actor), reference, reward)
"""
GAME = """
class Echo:
    def __init__(self, env_config=None, extras=None):
        self.turns = 0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        said = [{"role": "user", "content": f" {action[:3]} and {self.turns}|"}]
        score = sum(c.isdigit() for c in action) / 8
        return {"observations": said, "reward": score, "done": self.turns == 3, "metadata": {}}

    def close(self):
        pass
"""
REWARD = "def score(completions, **_):\n    return [sum(x.isdigit() for x in c) for c in completions]\n"
CONFIG: dict[str, Any] = {
    "flow": "grpo",
    "model": {"arch": "qwen2", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2},
    "data": {"files": "data.jsonl", "batch": 8},
    "reward": "reward.py:score",
    "rollout": {"n": 4, "max_tokens": 24},
    "train": {"lr": 1e-3},
    "workers": 2,
}
GENERATION = {"ranks": {"rollout": "0", "train": "1"}, "default": {"ranks": "train"}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"flow": "ppo", "algo": {"mini_batches": 2}, "critic": {"lr": 1e-2}},
    "conversation": {
        "environment": {"call": "game.py:Echo", "turn_tokens": 8},
        "rollout": {"n": 4, "max_tokens": 60},
        "reward": None,
    },
    "lora": {"train": {"lr": 1e-2, "lora": {"rank": 4}}},
    "stale": {
        "flow": "flow.py:tapped",
        "rollout": {"n": 4, "max_tokens": 24, "staleness": 1},
        "checkpoint": {"every": 1, "keep": 1000},
        "placement": {**GENERATION, "nodes": {"actor.generate": {"ranks": "rollout"}}},
    },
}


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "distflow", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    log = open(folder / "output", "a")  # noqa: SIM115 (it is the child's)
    return subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True, start_new_session=True)


def finish(folder: Path, *words: str) -> None:
    if start(folder, *words).wait():
        raise SystemExit((folder / "output").read_text()[-3000:])


def rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def demo(folder: Path, steps: int) -> Path:
    subprocess.run([sys.executable, str(SORTING / "data.py"), str(folder)], check=True, stdout=subprocess.DEVNULL)
    held_out = f"eval.files={folder}/held_out.jsonl"
    warmed = folder / "warmup"
    files = f"data.files={folder}/warmup.jsonl"
    finish(folder, "run", str(SORTING / "warmup.yaml"), f"run_dir={warmed}", files, held_out)
    finish(folder, "export", str(warmed), str(folder / "model"))
    more = f"model={folder}/model", f"data.files={folder}/train.jsonl", held_out, f"steps={steps}"
    finish(folder, "run", str(SORTING / "grpo.yaml"), f"run_dir={folder}/demo", *more)
    return folder / "demo"


def run(folder: Path, name: str, steps: int) -> Path:
    config = {k: v for k, v in (CONFIG | RUNS[name] | {"steps": steps}).items() if v is not None}
    path, run_dir = folder / f"{name}.yaml", folder / name
    path.write_text(json.dumps(config | {"run_dir": str(run_dir)}))
    if name == "stale":
        process = start(folder, "run", str(path))
        while len(rows(run_dir)) < steps // 2 and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit((folder / "output").read_text()[-3000:] + "it ended before it was killed")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"  stale: all killed after step {rows(run_dir)[-1]['step']}", flush=True)
        finish(folder, "run", str(path), "--resume=auto")
    else:
        finish(folder, "run", str(path))
    return run_dir


def prepare(folder: Path) -> None:
    prompts = [{"prompt": f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?"} for i in range(100)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    for name, text in (("flow", FLOW), ("game", GAME), ("reward", REWARD)):
        (folder / f"{name}.py").write_text(text)


def of_generating_weights(run_dir: Path) -> dict[int, float]:
    """Step → the largest difference from a forward pass with the weights that generated, from their checkpoint."""
    from generating_weights import largest_difference

    samples: dict[tuple[int, int], list[Any]] = {}
    for line in (run_dir.parent / f"{run_dir.name}.1.jsonl").read_text().splitlines():
        step, version, *sample = json.loads(line)
        samples.setdefault((step, version), []).append(sample)
    # There is no checkpoint of the first weights.
    return {step: largest_difference(run_dir, v, some) for (step, v), some in samples.items() if v}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default=",".join(["demo", *RUNS]), help="some of the runs")
    args = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for which in args.only.split(","):
            began = time.monotonic()
            run_dir = demo(folder, args.steps) if which == "demo" else run(folder, which, args.steps)
            steps = [row for row in rows(run_dir) if "rollout/mismatch_max" in row]
            gaps = {row["step"]: row["rollout/mismatch_max"] for row in steps}
            if which == "stale":
                gaps = of_generating_weights(run_dir)
                behind = sorted({row["rollout/staleness"] for row in steps})
            result[which] = {"steps": len(gaps), "max": max(gaps.values()), "not 0": sum(g > 0 for g in gaps.values())}
            result[which] |= {"staleness": behind} if which == "stale" else {}
            result[which]["s"] = round(time.monotonic() - began)
            print(f"{which:13s} {result[which]}", flush=True)
    print(json.dumps(result))
    sys.exit(any(row["max"] for row in result.values()))


if __name__ == "__main__":
    main()
