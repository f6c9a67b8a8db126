"""GRPO as ours and the peers run it: the same work, one run at a time, what it took."""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from pyarrow import parquet
from transformers import AutoTokenizer

import tree
from assets import make_assets

WORKERS, PROMPTS, SAMPLES, WARM_UP, KL = 2, 8, 8, 2, 0.04
SCRIPTS = Path(__file__).resolve().parent / "peers"
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


@dataclass(frozen=True)
class Peer:
    """A framework with a script in bench/peers and an environment of its own."""

    environment: str
    script: str
    ragged: bool = False  # whether its responses may end before the longest
    torchrun: bool = False
    variants: tuple[dict[str, str], ...] = ({},)

    def command(self, python: Path, work: Work, words: list[str]) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        size = ["--prompts", PROMPTS, "--samples", SAMPLES, "--workers", WORKERS, "--response", work.tokens]
        more = [*(("--kl", KL) if work.kl else ()), *(("--ragged",) if work.ragged else ())]
        begin = [str(python), *(launch if self.torchrun else []), str(SCRIPTS / self.script)]
        return [*begin, *words, *map(str, size), *map(str, more)]


SYNC = ({"PEER_NO_SYNC": "0"}, {"PEER_NO_SYNC": "1"})
PEERS = {
    "trl": Peer("trl", "trl_step.py", ragged=True, torchrun=True),
    "verl": Peer("verl05", "verl_step.py", variants=SYNC),
    "siirl": Peer("siirl", "siirl_step.py", variants=SYNC),
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
    for variant in peer.variants:
        for attempt in range(2):  # Ray does not always start at the first attempt
            with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as place:
                folder = Path(place)  # holds no folder `trl`, which TRL would take for itself
                out = folder / "result.json"
                words = ["--assets", str(assets), "--steps", str(WARM_UP + args.steps), "--out", str(out)]
                command = peer.command(python, work, words)
                ran = tree.run(command, environment(folder) | variant, folder, args.limit_s)
                if out.exists():
                    label = " ".join(f"{k}={v}" for k, v in variant.items())
                    found[label] = _read_peer(json.loads(out.read_text()))
                    break
                tail = ran.output.strip().splitlines()[-8:]
                why = "took too long" if ran.code is None else f"ended with {ran.code}"
                print(f"  {name}, attempt {attempt + 1}, {why}:", *tail, sep="\n    ", file=sys.stderr, flush=True)
    return found


def _read_peer(row: dict[str, Any]) -> Runs:
    versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
    steps, tokens = row["steps_s"][WARM_UP:], [row["tokens_per_step"]]
    return Runs(steps, [row["step_cpu_s_median"]], tokens, [{"phases_s": row["phases_s"]}], versions)


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


def absent(name: str, work: Work, args: argparse.Namespace) -> str | None:
    """Why a peer does not run."""
    peer = PEERS[name]
    if not (args.peers / peer.environment / "bin" / "python").exists():
        return f"not installed in {args.peers.name}/{peer.environment}"
    if work.ragged and not peer.ragged:
        return "its script makes every response as long as the longest allowed"
    return None


def prepare(folder: Path, chars: bool) -> float:
    """Makes model, tokenizer and prompts for ours and all peers; returns the mean tokens of a prompt."""
    make_assets(folder, chars)
    config = folder / "tokenizer_config.json"
    # The older transformers of verl and siiRL know the tokenizer by this name; they want a chat template as well.
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist([_for_verl(row) for row in rows]), folder / "prompts.parquet")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return statistics.mean(len(tokenizer(row["prompt"])["input_ids"]) for row in rows)


def _for_verl(row: dict[str, str]) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
    }
