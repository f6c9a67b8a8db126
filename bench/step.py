"""Whole GRPO steps: 8 prompts × 8 responses, a tiny Qwen2 in float32, two workers of one thread; ours and the peers'.

    python bench/step.py [--rounds 2] [--steps 5] [--only ours,trl] [--work even,ragged] [--scripts DIR] [--peers DIR]

  even     every response has 128 tokens
  kl       the same, with a penalty for moving away from a reference model
  ragged   a response ends where the model ends it, after 256 tokens at the latest; about 40 on average

Ours is `distflow run` on a config, as a user would; its times are those of its metrics.jsonl. The peers are scripts in
the folder given by --scripts (or PEER_SCRIPTS), `trl_grpo_cpu.py` and so on, each run in its environment in --peers
(`trl`, `verl05`, `siirl`); what is missing is null. They take turns, round after round. verl and siiRL run with and
without the all-reduce for every token that Hugging Face's `generate` does under FSDP, and the better counts.
Medians over all steps but the first two of a run. The last line is one JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

import tree
from assets import Matrices, make_assets, matrices
from workers import run_workers

WORKERS, PROMPTS, SAMPLES, WARM_UP, KL = 2, 8, 8, 2, 0.04
HERE = Path(__file__).resolve().parent
REWARD = '''\
def reward(completions, answer, **_):
    """1 for an answer that begins as it should; otherwise a little less than 0 for every word too many or too few."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if c.strip().startswith(a) else -0.01 * abs(4 - len(c.split())) for c, a in pairs]
'''
# What our step spends in the model; the rest is overhead.
MODEL = ("actor.generate", "actor.update", "actor.logprobs", "reference.logprobs", "actor_weights")


@dataclass(frozen=True)
class Work:
    tokens: int  # of a response, at most
    ragged: bool = False
    kl: bool = False


WORK = {"even": Work(128), "kl": Work(128, kl=True), "ragged": Work(256, ragged=True)}


@dataclass
class Runs:
    """What one framework has shown on one work, over all rounds."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of a step, all processes; of a peer, one median per run
    tokens: list[float] = field(default_factory=list)  # real ones, of the responses of a step
    more: list[dict[str, Any]] = field(default_factory=list)  # per run
    versions: str = ""

    @property
    def s(self) -> float:
        return statistics.median(self.step_s)

    def summary(self) -> dict[str, Any]:
        cpu = statistics.median(self.cpu_s) if self.cpu_s else None
        tokens = statistics.mean(self.tokens)
        speed = tokens / statistics.mean(self.step_s)
        found = {"s": self.s, "min_s": min(self.step_s), "cpu_s": cpu, "tokens": tokens, "tokens_per_s": speed}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()} | {
            "steps": len(self.step_s),
            "runs": self.more,
        }


# ---------------------------------------------------------------------------------------------- the frameworks


@dataclass(frozen=True)
class Peer:
    """A framework with a script of its own; `kl` is what asks it for a reference model."""

    environment: str
    script: str
    kl: tuple[str, ...] = ("--kl",)
    ragged: tuple[str, ...] | None = None  # None: it has no way to let responses end
    torchrun: bool = False
    variants: tuple[dict[str, str], ...] = ({},)

    def command(self, python: Path, script: Path, work: Work, words: list[str]) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        world = [] if self.torchrun else ["--world", str(WORKERS)]
        more = [*(self.kl if work.kl else ()), *((self.ragged or ()) if work.ragged else ())]
        begin = [str(python), *(launch if self.torchrun else []), str(script)]
        return [*begin, *words, *world, "--response", str(work.tokens), *more]


SYNC = ({"SHIM_NOSYNC": "0"}, {"SHIM_NOSYNC": "1"})
PEERS = {
    "trl": Peer("trl", "trl_grpo_cpu.py", kl=("--beta", str(KL)), ragged=("--ragged",), torchrun=True),
    "verl": Peer("verl05", "verl_grpo_cpu.py", variants=SYNC),
    "siirl": Peer("siirl", "siirl_grpo_cpu.py", variants=SYNC),
}


def environment(folder: Path) -> dict[str, str]:
    """The same for all: one thread a worker, waiting threads sleep, everybody is on this machine."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),
        # A Ray of its own, which does not nice its workers: they would lose the processor to anybody.
        "RAY_TMPDIR": str(folder),
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy",
    }
    env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        env.pop(name, None)
    return env


def run_peer(name: str, work: Work, assets: Path, args: argparse.Namespace) -> dict[str, Runs]:
    """One run of each variant; a variant that fails is absent."""
    peer, found = PEERS[name], {}
    python = args.peers.absolute() / peer.environment / "bin" / "python"
    script = args.scripts.absolute() / peer.script
    for variant in peer.variants:
        for attempt in range(2):  # Ray does not always start at the first attempt
            with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as place:
                folder = Path(place)  # holds no folder `trl`, which TRL would take for itself
                out = folder / "result.json"
                words = ["--assets", str(assets), "--steps", str(WARM_UP + args.steps), "--out", str(out)]
                command = peer.command(python, script, work, words)
                ran = tree.run(command, environment(folder) | variant, folder, args.limit_s)
                if out.exists():
                    label = " ".join(f"{k}={v}" for k, v in variant.items())
                    found[label] = _read_peer(json.loads(out.read_text()))
                    break
                told = ran.output.strip().splitlines()[-8:]
                why = "took too long" if ran.code is None else f"ended with {ran.code}"
                print(f"  {name}, attempt {attempt + 1}, {why}:", *told, sep="\n    ", file=sys.stderr, flush=True)
    return found


def _read_peer(row: dict[str, Any]) -> Runs:
    packages = ("trl", "verl", "siirl", "transformers", "ray", "torch")
    versions = ", ".join(f"{p} {row[p]}" for p in packages if p in row)
    tokens = row.get("real_tokens_per_step", row["global_rollouts"] * row["response_tokens"])
    phases = row.get("phases_s_median") or row.get("spans_s_per_step")
    return Runs(row["steps_s"][WARM_UP:], [row["step_cpu_s_median"]], [tokens], [{"phases_s": phases}], versions)


def run_ours(work: Work, assets: Path, seed: int, args: argparse.Namespace) -> Runs:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "reward.py").write_text(REWARD)
        config = {
            "flow": "grpo",
            "workers": WORKERS,
            "steps": WARM_UP + args.steps,
            "seed": seed,
            "run_dir": str(folder / "run"),
            "model": str(assets),
            "data": {"files": str(assets / "prompts.jsonl"), "batch": PROMPTS},
            "rollout": {"n": SAMPLES, "max_tokens": work.tokens, "min_tokens": 0 if work.ragged else work.tokens},
            "train": {"lr": 1e-5, "micro_tokens": 8192},  # all samples of a worker in one pass, like the peers
            "reward": "reward.py:reward",
            "algo": {"kl": KL} if work.kl else {},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "distflow", "run", str(folder / "config.yaml"), *args.set]
        ran = tree.run(command, environment(folder), folder, args.limit_s)
        if ran.code != 0:
            raise SystemExit(f"distflow run failed:\n{ran.output[-4000:]}")
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    everything = ran.cpu_between(rows[WARM_UP - 1]["time"], rows[-1]["time"])
    rows = rows[WARM_UP:]

    def column(key: str) -> list[float]:
        return [row[key] for row in rows if key in row]

    timings = {k.removeprefix("timing_s/"): statistics.median(column(k)) for k in rows[0] if k.startswith("timing_s/")}
    run = {
        "timing_s": timings,  # means over workers
        "update_s": statistics.median(column("timing_max_s/actor.update")),
        "overhead_frac": statistics.median(1 - _in_model(row) / row["timing_max_s/step"] for row in rows),
        # The workers' CPU seconds are in the metrics. This is the whole tree's, with reward processes and launcher, and
        # between steps; a mean.
        "tree_cpu_s": everything / len(rows) if everything is not None else None,
    }
    return Runs(column("timing_max_s/step"), column("perf/cpu_s"), column("perf/tokens"), [run], _our_versions())


def _in_model(row: dict[str, float]) -> float:
    """Of each stage the slowest worker's time: that others wait for it is not overhead, but its model's work."""
    return sum(row.get(f"timing_max_s/{name}", 0.0) for name in MODEL)


def _our_versions() -> str:
    return ", ".join(f"{p} {version(p)}" for p in ("distflow-rl", "transformers", "torch"))


# ---------------------------------------------------------------------------------------------- the limit of training


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


def matmul_worker(out: str, folder: str, tokens: int, responses: int, seconds: float) -> None:
    """One of two processes that do nothing but the multiplications of a training pass, at the same time: `torch.mm` at
    the shapes of the model with the tokens of one worker, forward, for the input's gradient, and for the weight's."""
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
        Path(out).write_text(json.dumps({"gflops": float(total) / WORKERS}))
    dist.barrier()
    dist.destroy_process_group()


def matmul_fraction(ours: Runs, assets: Path, prompt: float, seconds: float) -> tuple[float, float]:
    """How much of that limit the update of the run just done reaches, and the limit in GFLOP/s of one process."""
    sequences = PROMPTS * SAMPLES
    response = statistics.mean(ours.tokens) / sequences
    tokens, responses = round(sequences * (prompt + response - 1) / WORKERS), round(sequences * response / WORKERS)
    words = ["--matmul", str(assets), str(tokens), str(responses), str(seconds)]
    gflops = run_workers(__file__, WORKERS, *words)["gflops"]
    flops = training_flops(matrices(assets), sequences, prompt, response)
    return flops / (gflops * 1e9 * WORKERS * ours.more[-1]["update_s"]), gflops


# ---------------------------------------------------------------------------------------------- the whole run


def prepare(folder: Path, chars: bool, args: argparse.Namespace) -> float:
    """Model, tokenizer and prompts, by the peers' script where there is one; mean tokens of a prompt, as we see them.

    The older transformers of verl and siiRL cannot read a tokenizer that a newer one wrote, so theirs come first. They
    also split numbers otherwise, with 9 tokens a prompt where we and TRL have 13: a little less work for them.
    """
    pythons = [args.peers.absolute() / e / "bin" / "python" for e in ("verl05", "siirl", "trl")]
    python = next((p for p in pythons if p.exists()), None)
    if args.scripts and python and (args.scripts / "tiny_assets.py").exists():
        script = [str(args.scripts.absolute() / "tiny_assets.py"), str(folder)]
        command = [str(python), *script, "--hidden", "256", "--layers", "4", "--vocab", "1024"]
        env = environment(folder.parent)
        subprocess.run([*command, *(["--chars"] if chars else [])], check=True, env=env, capture_output=True)
    else:
        make_assets(folder, chars)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    return statistics.mean(len(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines)


def absent(name: str, work: Work, args: argparse.Namespace) -> str | None:
    """Why a peer does not run."""
    peer = PEERS[name]
    if not args.scripts or not (args.scripts / peer.script).exists():
        return "no script of it: give --scripts"
    if not (args.peers / peer.environment / "bin" / "python").exists():
        return f"not installed in {args.peers.name}/{peer.environment}"
    if work.ragged and peer.ragged is None:
        return "its script makes every response as long as the longest allowed"
    return None


def measure(
    args: argparse.Namespace, folder: Path
) -> tuple[dict[str, dict[str, dict[str, Runs]]], dict[str, list[dict[str, float]]], dict[str, str]]:
    """work → framework → variant → runs; work → what the matmul limit is in each round; and notes."""
    found: dict[str, dict[str, dict[str, Runs]]] = {w: {} for w in args.work}
    limits: dict[str, list[dict[str, float]]] = {w: [] for w in args.work}
    notes: dict[str, str] = {}
    assets = {chars: folder / ("chars" if chars else "tokens") for chars in {WORK[w].ragged for w in args.work}}
    prompt = {chars: prepare(place, chars, args) for chars, place in assets.items()}
    for i in range(args.rounds):
        for w in args.work:
            work = WORK[w]
            for name in args.only:
                if name == "ours":
                    runs = {"": run_ours(work, assets[work.ragged], i, args)}
                    reached, gflops = matmul_fraction(runs[""], assets[work.ragged], prompt[work.ragged], args.matmul_s)
                    limits[w].append({"matmul_frac": reached, "gflops": gflops})
                elif why := absent(name, work, args):
                    notes[f"{w}, {name}"] = why
                    continue
                else:
                    runs = run_peer(name, work, assets[work.ragged], args)
                    if not runs:
                        notes[f"{w}, {name}"] = "failed"
                for variant, run in runs.items():
                    all_rounds = found[w].setdefault(name, {}).setdefault(variant, Runs())
                    for key in ("step_s", "cpu_s", "tokens", "more"):
                        getattr(all_rounds, key).extend(getattr(run, key))
                    all_rounds.versions = run.versions
                    cpu = f"{statistics.median(run.cpu_s):.2f}" if run.cpu_s else "–"
                    label = f"{name} {variant}".strip()
                    print(f"  round {i + 1}, {w}: {label} {run.s:.2f} s ({cpu} CPU s)", flush=True)
    return found, limits, notes


def versus(rows: dict[str, dict[str, Runs]]) -> dict[str, float | None]:
    """How many times faster ours is than each peer in the better of its variants."""
    ours = rows.get("ours", {}).get("")
    found: dict[str, float | None] = {}
    for name in PEERS:
        theirs = rows.get(name, {}).values()
        found[f"vs_{name}"] = round(min(r.s for r in theirs) / ours.s, 3) if ours and theirs else None
    for name in PEERS:
        theirs = rows.get(name, {}).values()
        cpu = min((statistics.median(r.cpu_s) for r in theirs), default=None)
        mine = statistics.median(ours.cpu_s) if ours and ours.cpu_s else None
        found[f"vs_{name}_cpu"] = round(cpu / mine, 3) if cpu and mine else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(*known: str) -> dict[str, Any]:
        def read(text: str) -> list[str]:
            words = text.split(",")
            for word in words:
                if word not in known:
                    raise argparse.ArgumentTypeError(f"'{word}' is none of {', '.join(known)}")
            return words

        return {"type": read, "default": list(known), "help": f"some of {','.join(known)}"}

    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help=f"of a run, after {WARM_UP} to warm up")
    parser.add_argument("--only", **several("ours", *PEERS))
    parser.add_argument("--work", **several(*WORK))
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of the peers' environments")
    scripts = os.environ.get("PEER_SCRIPTS")
    parser.add_argument("--scripts", type=Path, default=scripts, help="folder of the peers' scripts")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of our config")
    parser.add_argument("--limit-s", type=float, default=900, help="for one run")
    parser.add_argument("--matmul-s", type=float, default=3, help="to measure the limit of matmul")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--matmul", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        assets, tokens, responses, seconds = args.matmul
        matmul_worker(args.worker, assets, int(tokens), int(responses), float(seconds))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and what was started is ended
    with tempfile.TemporaryDirectory() as folder:
        found, limits, notes = measure(args, Path(folder))

    head = f"{'':7s} {'':22s} {'step, s':>9s} {'min':>7s} {'CPU s':>7s} {'tokens':>8s} {'tokens/s':>9s}"
    print(head)
    for w, rows in found.items():
        for name, variants in rows.items():
            for variant, runs in variants.items():
                r = runs.summary()
                cpu = f"{r['cpu_s']:7.2f}" if r["cpu_s"] is not None else f"{'–':>7s}"
                label = f"{name} {variant}".strip()
                times = f"{r['s']:9.3f} {r['min_s']:7.3f} {cpu}"
                print(f"{w:7s} {label:22s} {times} {r['tokens']:8.0f} {r['tokens_per_s']:9.0f}")
        ratios = "  ".join(f"{k} {v}" for k, v in versus(rows).items() if v is not None)
        if ratios:
            print(f"{w:7s} {ratios}")
    for what, why in notes.items():
        print(f"{what}: {why}")

    def middle(w: str, key: str) -> float | None:
        return round(statistics.median(row[key] for row in limits[w]), 3) if limits.get(w) else None

    overhead = {}
    for w in ("even", "ragged"):
        for runs in found.get(w, {}).get("ours", {}).values():
            overhead[w] = round(statistics.median(r["overhead_frac"] for r in runs.more), 4)
    every = [(n, r) for rows in found.values() for n, v in rows.items() for r in v.values()]
    result = {
        "even": versus(found.get("even", {})) | {"kl": versus(found.get("kl", {}))},
        "ragged": versus(found.get("ragged", {})),
        "overhead_frac": max(overhead.values(), default=None),
        "matmul_frac": middle("even", "matmul_frac"),
        "overhead_frac_of": overhead,
        "matmul_frac_of": {w: middle(w, "matmul_frac") for w in found},
        "matmul_gflops_per_process": {w: middle(w, "gflops") for w in found},
        "rounds": args.rounds,
        "steps": args.steps,
        "versions": {n: r.versions for n, r in every},
        "notes": notes,
        "raw": {
            w: {f"{n} {v}".strip(): r.summary() for n, vs in rows.items() for v, r in vs.items()}
            for w, rows in found.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
