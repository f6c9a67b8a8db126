"""A run that is killed over and over, against the same run undisturbed: weights, metrics and samples must be equal.

`python bench/chaos.py [--steps 100] [--kills 22] [--workers 4] [--seed 0] [--conversations]`. Workers are killed
(SIGKILL) at random moments, while they generate, exchange, update or write a checkpoint, one of them or all; between
attempts files of the newest checkpoint are truncated, and the disk is filled for a while (on a small tmpfs, if it can
be mounted). Only its launcher restarts the run. With `--conversations`, rollouts are conversations with an environment
that takes its time. One JSON object is the last line.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from distflow.checkpoint.store import list_checkpoints, load_full_tensors
from distflow.run_folder import checkpoint_dir

MOMENTS = ("actor.generate", "move", "actor.update", "checkpoint", "any")
CURVES = ("actor/loss", "actor/grad_norm", "actor/kl", "actor/entropy", "reward/mean", "response_length/mean")
FLOW = """
import json

from distflow import flow, node
from distflow.flows.grpo import grpo


@node(writes=())
def trained(batch, ctx):
    if ctx.is_dp_leader:
        with open(ctx.folder.parent / f"{ctx.folder.name}.{ctx.rank}.ids", "a") as file:
            file.write(json.dumps([ctx.step, batch.ids.tolist()]) + "\\n")


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
Records = list[dict[str, object]]


def prepare(folder: Path, steps: int, workers: int, conversations: bool) -> Path:
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
        "restarts": 1000,
        "wait_limit_s": 30,
    }
    if conversations:
        del config["reward"]
        config |= {"environment": {"call": "game.py:Echo", "turn_tokens": 8}, "rollout": {"n": 4, "max_tokens": 60}}
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distflow", "run", str(config), f"run_dir={run}"]
    log = open(run.with_suffix(".log"), "ab")  # noqa: SIM115 (the process has it)
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def records(run: Path, workers: int) -> Records:
    """Returns the heartbeats of all workers; empty unless all of them are running."""
    heartbeats: Records = []
    for rank in range(workers):
        try:
            record = json.loads((run / "workers" / f"{rank}.heartbeat").read_text())
            os.kill(record["pid"], 0)
        except (OSError, ValueError, KeyError):
            return []
        heartbeats.append(record)
    return heartbeats


class Chaos:
    def __init__(self, run: Path, workers: int, steps: int, kills: int, seed: int, disk: bool) -> None:
        self.run, self.workers, self.steps, self.kills, self.disk = run, workers, steps, kills, disk
        self.rng = random.Random(seed)
        self.moments: Counter[str] = Counter()
        self.killed_all = self.truncated = self.filled = 0

    def strike(self, process: subprocess.Popen[bytes], number: int) -> bool:
        """Kills one worker or all at some moment; False if the run ended before."""
        moment = MOMENTS[number % len(MOMENTS)]
        victim, everybody = self.rng.randrange(self.workers), self.rng.random() < 0.3
        share = self.rng.random()
        when: int | None = None  # the step, chosen so that all kills fit into the run
        deadline = time.monotonic() + 180
        now: Records = []
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            now = records(self.run, self.workers)
            step = int(now[victim]["step"]) if now else -1  # type: ignore[call-overload]
            if step >= 0:
                if when is None:
                    when = step + int(share * 1.5 * (self.steps - step) / (self.kills - number + 1))
                # Do not wait for ever for a moment that does not come.
                if step >= when and (self._is(moment, now[victim]) or step > when + 6):
                    break
            time.sleep(0.001)
        targets = now if everybody else [now[victim]] if now else []
        for record in targets:
            with suppress(ProcessLookupError):
                os.kill(int(record["pid"]), signal.SIGKILL)  # type: ignore[call-overload]
        self.moments[moment] += 1
        self.killed_all += everybody
        if number % 5 == 3:
            self._truncate()
        if self.disk and number % 8 == 6:
            self._fill()
        return bool(targets)

    def _is(self, moment: str, record: dict[str, object]) -> bool:
        if moment == "checkpoint":
            return any((self.run / "checkpoints").glob("step_*.part"))
        return moment == "any" or str(record["task"]).startswith(moment)

    def _truncate(self) -> None:
        folder = self.run / "checkpoints"
        steps = list_checkpoints(folder)
        with suppress(OSError):
            if len(steps) > 1:
                path = self.rng.choice(sorted(p for p in checkpoint_dir(folder, steps[0]).rglob("*") if p.is_file()))
                os.truncate(path, path.stat().st_size // 2)
                self.truncated += 1

    def _fill(self) -> None:
        ballast = self.run / "ballast"
        with suppress(OSError), open(ballast, "wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(self.rng.uniform(1, 4))
        ballast.unlink(missing_ok=True)
        self.filled += 1


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=22)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = prepare(folder, args.steps, args.workers, args.conversations)
        calm, storm = folder / "calm", folder / "storm"
        if start(config, calm).wait():
            raise SystemExit((folder / "calm.log").read_text())
        calm_s = time.monotonic() - began
        storm.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(storm)]
        disk = subprocess.run(mount, capture_output=True).returncode == 0
        chaos, kills = Chaos(storm, args.workers, args.steps, args.kills, args.seed, disk), 0
        try:
            process = start(config, storm)
            while kills < args.kills and chaos.strike(process, kills):
                kills += 1
                print(f"kill {kills}: {dict(chaos.moments)}", file=sys.stderr)
            code = process.wait()
            log = (folder / "storm.log").read_text()
            if code:
                raise SystemExit(log)
            final = [checkpoint_dir(run / "checkpoints", args.steps) / "actor" for run in (calm, storm)]
            one, other = (load_full_tensors(folder) for folder in final)
            same_weights = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
            same_curves = curves(calm) == curves(storm)
            wanted, got = (history(run, args.workers) for run in (calm, storm))
        finally:
            if disk:
                subprocess.run(["umount", "-l", str(storm)], check=False)
    loaded = Counter(i for ids in wanted.values() for i in ids)
    trained = Counter(i for ids in got.values() for i in ids)
    result = {
        "kills": kills,
        "identical": same_weights and same_curves,
        "samples_lost": sum((loaded - trained).values()),
        "samples_repeated": sum((trained - loaded).values()),
        "samples": sum(loaded.values()),
        "moments": dict(chaos.moments),
        "killed_all": chaos.killed_all,
        "truncated": chaos.truncated,
        "disk_filled": chaos.filled,
        "restarts": log.count("restart "),
        "steps": args.steps,
        "workers": args.workers,
        "conversations": args.conversations,
        "calm_s": round(calm_s),
        "s": round(time.monotonic() - began),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
