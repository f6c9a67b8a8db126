"""A run that is disturbed over and over, against the same run undisturbed: weights, metrics and samples must be equal.

    python bench/chaos.py [--rounds 2] [--steps 240] [--workers 4] [--seed 0] [--conversations] [--branches]

A round has 20 disturbances; `disturbances.py` says what they are: workers and launchers are killed, the newest
checkpoint is cut short, the disk is filled, the clock is set, another run is started in the folder, and links between
hosts are cut for a while or for good, both ways or one way. Whoever is left has to cope: the launcher restarts workers,
as often as it does by default, and only a launcher or host that is gone is started again, with `--resume=auto`. With
`--conversations`, rollouts are conversations with an environment that takes its time; with `--branches`, samples have
several histories, made by an agent, and each history counts as a sample. Hosts and small disks need root; without it
those disturbances are left out. One JSON object is the last line.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from distflow.checkpoint.store import load_full_tensors
from distflow.run_folder import checkpoint_dir
from disturbances import ROUND, Storm, why_no_hosts

CURVES = ("actor/loss", "actor/grad_norm", "actor/kl", "actor/entropy", "reward/mean", "response_length/mean")
FLOW = """
import json
import time

from distflow import flow, node
from distflow.flows.grpo import grpo


@node(writes=(), optional=("response_branches",))
def trained(batch, ctx):
    if (ctx.folder.parent / "slowly").exists():
        time.sleep(1)
    if ctx.is_dp_leader:
        with open(ctx.folder.parent / f"{ctx.folder.name}.{ctx.rank}.ids", "a") as file:
            more = batch["response_branches"].lengths.tolist() if "response_branches" in batch else [0] * len(batch)
            ids = [1000 * i + k for i, n in zip(batch.ids.tolist(), more, strict=True) for k in range(n + 1)]
            file.write(json.dumps([ctx.step, ids]) + "\\n")


class Tapped:
    def __init__(self, actor):
        self.logprobs, self.generate, self._update = actor.logprobs, actor.generate, actor.update

    def update(self, *seen, **constants):
        trained(seen[0])
        self._update(*seen, **constants)


@flow
def tapped(prompts, actor, reference, reward):
    grpo.fn(prompts, Tapped(actor), reference, reward, kl=0.01)
"""
ENVIRONMENT = """
import random
import time


class Echo:
    def __init__(self, env_config=None, extras=None):
        self.turns, self.last = 0, random.randrange(1, 4)

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        time.sleep(random.SystemRandom().expovariate(50))
        digits = sum(c.isdigit() for c in action)
        said = [{"role": "user", "content": f" {action[:3]} and {random.randrange(100)}|"}]
        return {"observations": said, "reward": digits / 8, "done": self.turns == self.last, "metadata": {}}

    def close(self):
        pass
"""


AGENT = """
import json
import urllib.request


def ask(base_url, api_key, *texts):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def forks(base_url, api_key, prompt):
    first = ask(base_url, api_key, prompt)
    said = [ask(base_url, api_key, prompt, first, text) for text in ("more", "other")]
    said.append(ask(base_url, api_key, "in short: " + first[:3]))
    return sum(c.isdigit() for text in (first, *said) for c in text) / 8
"""


def prepare(folder: Path, steps: int, workers: int, conversations: bool, branches: bool) -> Path:
    rows = [{"prompt": f"{'so ' * (i % 5)}what is {i} + {i * i % 17}?"} for i in range(100)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(
        "def score(completions, **_):\n    return [sum(x.isdigit() for x in c) for c in completions]\n"
    )
    (folder / "game.py").write_text(ENVIRONMENT)
    config: dict[str, object] = {
        "flow": "flow.py:tapped",
        "model": {"arch": "qwen2", "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "data.jsonl", "batch": 8},
        "reward": "reward.py:score",
        "rollout": {"n": 4, "max_tokens": 24},
        "train": {"lr": 1e-3, "warmup": 10, "schedule": "cosine"},
        "checkpoint": {"every": 4, "keep": 3},
        "steps": steps,
        "workers": workers,
        "wait_limit_s": 60,
    }
    if conversations:
        del config["reward"]
        config |= {"environment": {"call": "game.py:Echo", "turn_tokens": 8}, "rollout": {"n": 4, "max_tokens": 60}}
    if branches:
        (folder / "agent.py").write_text(AGENT)
        del config["reward"]
        config |= {"environment": {"call": "agent.py:forks", "turn_tokens": 6}, "rollout": {"n": 4, "max_tokens": 60}}
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def history(run: Path, workers: int) -> dict[int, list[int]]:
    """Returns step → the ids of the samples it was trained on, the last time it was run."""
    steps: dict[int, dict[int, list[int]]] = {}
    for rank in range(workers):
        for line in (run.parent / f"{run.name}.{rank}.ids").read_text().splitlines():
            with suppress(ValueError):  # cut short by a kill
                step, ids = json.loads(line)
                steps.setdefault(step, {})[rank] = ids
    return {step: sorted(i for ids in by.values() for i in ids) for step, by in steps.items()}


def curves(run: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row["step"], *(row[c] for c in CURVES)] for row in rows]


def calm_run(config: Path, run: Path) -> None:
    command = [sys.executable, "-m", "distflow", "run", str(config), f"run_dir={run}"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def order(rounds: int, leave_out: set[str], rng: random.Random) -> list[str]:
    """Returns the disturbances in their order: those of hosts are the last of a round, as they need others."""
    result: list[str] = []
    for _ in range(rounds):
        kinds = [kind for kind, count in ROUND.items() for _ in range(count) if kind not in leave_out]
        rng.shuffle(kinds)
        result += sorted(kinds, key=lambda kind: kind.startswith("link"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    rollouts = parser.add_mutually_exclusive_group()
    rollouts.add_argument("--conversations", action="store_true")
    rollouts.add_argument("--branches", action="store_true")
    parser.add_argument("--leave-out", nargs="+", default=[], choices=list(ROUND), metavar="KIND")
    args = parser.parse_args()
    began, rng = time.monotonic(), random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    config = prepare(folder, args.steps, args.workers, args.conversations, args.branches)
    calm, run = folder / "calm", folder / "storm"
    calm_run(config, calm)
    calm_s = time.monotonic() - began
    leave_out = set(args.leave_out)
    run.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(run)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        leave_out.add("disk full")
    if why_no_hosts():
        leave_out |= {kind for kind in ROUND if kind.startswith("link")}
    try:
        storm = Storm(config, run, args.workers, args.steps, rng)
        storm.weather(order(args.rounds, leave_out, rng))
        final = [checkpoint_dir(r / "checkpoints", args.steps) / "actor" for r in (calm, run)]
        one, other = (load_full_tensors(folder) for folder in final)
        same_weights = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
        same_curves = curves(calm) == curves(run)
        wanted, got = (history(r, args.workers) for r in (calm, run))
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(run)], check=False)
    loaded = Counter(i for ids in wanted.values() for i in ids)
    trained = Counter(i for ids in got.values() for i in ids)
    result = {
        "disturbances": sum(storm.done.values()),
        "identical": same_weights and same_curves,
        "samples_lost": sum((loaded - trained).values()),
        "samples_repeated": sum((trained - loaded).values()),
        "samples": sum(loaded.values()),
        "kinds": dict(storm.done),
        "left_out": sorted(leave_out),
        **storm.counts(),
        "steps": args.steps,
        "workers": args.workers,
        "conversations": args.conversations,
        "branches": args.branches,
        "calm_s": round(calm_s),
        "s": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    shutil.rmtree(folder)
    sys.exit(0 if result["identical"] and not (result["samples_lost"] or result["samples_repeated"]) else 1)


if __name__ == "__main__":
    main()
