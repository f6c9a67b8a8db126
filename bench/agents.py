"""Conversations with environments that answer late: ours, turn by turn in lockstep, and TRL's tool loop.

    python bench/agents.py [--rounds 3] [--conversations 64] [--turns 16] [--trl-turns 4] [--history 2048]
        [--peers DIR]

The model (4M parameters, see talker.py) says some words and calls a tool in every turn; the tool takes 50 ms in the
middle and 1 s one time in twenty (peers/slow_environment.py). All conversations of a round begin at once; a round ends
with the last of them. Latencies are the same for all drivers in the same round.
  ours      the loop of a worker: processes, sessions, the built-in engine
  lockstep  the same engine, children and sessions; a turn is generated when all environments have answered, and
            environments, which answer all at once, are asked when all turns are generated
  trl       GRPOTrainer's tool loop, same model and environment, in DIR/trl; null if that is not there. Each turn
            of it takes the sum of all latencies, so it has only --trl-turns
  long      ours, a quarter of the conversations, half of the turns, with a prompt of --history tokens
  no_reuse  the same, but the engine computes the whole history in every turn: nothing is kept
  shared    an update of the same model on samples with four histories, what these share packed once (branches.py)
  unshared  the same update, every history packed whole: the gradients are the same
All but TRL's have one thread for the model, TRL's has two.
Throughput is in turns per second. `engine_busy_frac`: the share of the time in which there was anything to decode that
was spent inside the engine. Medians of the rounds; the last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from serve import Served, keep_stdout_for_answers, serve
from talker import make_talker

THREADS = {"trl": 2}  # of the model; of the others, whose environments are processes of their own, 1
UPDATES = ("shared", "unshared")
TURN_TOKENS, PER_TURN = 128, 48  # PER_TURN: tokens of a turn and its answer, at most, on average
HERE = Path(__file__).resolve().parent
Row = dict[str, Any]


class Ours:
    """A worker's engine, children and loop, without the rest of a worker."""

    def __init__(self, model: str, conversations: int, turns: int, history: int, keep: bool = True) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from distflow.agents.env_pool import EnvPool
        from distflow.agents.rendering import Renderer
        from distflow.agents.runtime import EnvironmentRuntime
        from distflow.agents.session import ConversationLimits
        from distflow.agents.spec import EnvironmentSpec
        from distflow.model import attention
        from distflow.model.llama_family import fused_weights
        from distflow.model.source import Source, kv_bytes
        from distflow.model.text import Text
        from distflow.rollout.builtin.generator import CacheLimits, Generator
        from distflow.rollout.builtin.weight_buffers import empty_weights
        from distflow.rollout.engine import SamplingParams
        from distflow.run.process import keep_freed_memory

        self.conversations, self.turns, self.prompt = conversations, turns, "look" + " hm" * history
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention.NAME)
        lm.eval().requires_grad_(False)
        keep_freed_memory()
        shapes = {name: tuple(p.shape) for name, p in lm.named_parameters()}
        tensors = empty_weights(shapes, fused_weights(lm), torch.float32, torch.device("cpu"))
        for name, p in lm.named_parameters():
            p.data = tensors[name].copy_(p.data)
        limits = CacheLimits(kv_bytes(lm.config, torch.float32, 1), 2 << 30, 256)
        self.engine: Any = _Engine(Generator(lm, limits, torch.device("cpu"), max_batches=1), keep)
        tokenizer = AutoTokenizer.from_pretrained(model)
        text = Text(Source("talker", AutoConfig.from_pretrained(model), tokenizer), 512 + history)
        self.longest = 512 + history + turns * PER_TURN
        self.params = SamplingParams(turns * PER_TURN, stop=frozenset([tokenizer.eos_token_id]))
        limits_of_runtime = ConversationLimits(turns, turns * PER_TURN, TURN_TOKENS)
        self.runtimes = [EnvironmentRuntime("slow", Renderer(text), limits_of_runtime, conversations)]
        self.env_pool = EnvPool([EnvironmentSpec("slow", "slow_environment.py:Slow")], HERE / "peers")
        self.env_pool.describe()
        self.rounds = 0

    def samples(self) -> list[Any]:
        from distflow.agents.conversation import Sample

        first = self.rounds * self.conversations
        self.rounds += 1
        seeds = range(first, first + self.conversations)
        return [Sample(s, 0, [{"role": "user", "content": self.prompt}], {"seed": s}, s) for s in seeds]

    def loop(self, samples: list[Any]) -> Any:
        from distflow.agents.conversations import Conversations

        return Conversations(samples, self.runtimes, self.env_pool, self.params, 0, 0)

    def run(self) -> Row:
        from distflow.agents.converse import converse

        samples = self.samples()
        ids = [s.id for s in samples]
        records, use = converse(self.engine, self.loop(samples), ids, self.longest, self.conversations)
        return {**_work(records), "busy": use.busy, "reused": use.reused}

    def lockstep(self) -> Row:
        samples = self.samples()
        loop, records, requests = self.loop(samples), dict[int, Any](), list[Any]()
        with self.engine.serving(self.conversations, self.longest):
            while len(records) < len(samples):
                actions = loop.collect(wait=True)
                requests += actions.requests
                records |= {r.sample_id: r for r in actions.ended}
                self.engine.forget([r.sample_id for r in actions.ended])
                if len(requests) < len(samples) - len(records):
                    continue  # somebody's environment has not answered
                for request in requests:
                    self.engine.add_request(request)
                requests, completions = [], []
                while self.engine.has_unfinished:
                    completions += self.engine.step()
                for completion in completions:
                    loop.complete(completion)
        return _work(records)


class _Engine:
    """The generator with the methods of a rollout engine that conversations call."""

    def __init__(self, generator: Any, keep: bool) -> None:
        self._generator, self._keep = generator, keep

    def add_request(self, request: Any) -> None:
        self._generator.add_request(request if self._keep else replace(request, keep=False))

    def step(self, wake: Any = lambda: False) -> Any:
        return self._generator.step(wake)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _work(records: dict[int, Any]) -> Row:
    failures = [r.failure for r in records.values() if r.failure]
    if failures:
        raise SystemExit(f"{len(failures)} conversations failed: {failures[0]}")
    return {"turns": sum(r.turns for r in records.values()), "tokens": sum(sum(r.mask) for r in records.values())}


def work(name: str, model: str, conversations: int, turns: int, history: int) -> None:
    if name in UPDATES:
        from branches import Update

        run = Update(model, name == "shared").run
        run()
    else:
        ours = Ours(model, conversations, turns, history, keep=name != "no_reuse")
        run = ours.lockstep if name == "lockstep" else ours.run
        run()
        ours.rounds = 0
    serve(run, {"version": f"distflow {version('distflow-rl')}, torch {torch.__version__}"})


def commands(args: argparse.Namespace, model: Path) -> dict[str, list[str]]:
    def driver(name: str, *sizes: int) -> list[str]:
        return [sys.executable, __file__, "--driver", name, str(model), *map(str, sizes)]

    found = {name: driver(name, args.conversations, args.turns, 0) for name in ("ours", "lockstep")}
    if args.history:
        sizes = args.conversations // 4, args.turns // 2, args.history
        found |= {name: driver(name, *sizes) for name in ("long", "no_reuse")}
    found |= {name: driver(name, 0, 0, 0) for name in UPDATES}
    trl = args.peers.absolute() / "trl" / "bin" / "python"
    if trl.exists() and args.trl_turns:
        tokens = str(args.trl_turns * PER_TURN)
        trl_sizes = [str(model), str(args.conversations), str(args.trl_turns), tokens]
        found["trl"] = [str(trl), str(HERE / "peers" / "trl_tools.py"), *trl_sizes]
    return found


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Row]], dict[str, str]]:
    model = folder / "model"
    make_talker(model)
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    env.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    drivers: dict[str, Served] = {}
    rows: dict[str, list[Row]] = {}
    versions: dict[str, str] = {}
    try:
        for name, command in commands(args, model).items():
            drivers[name] = Served(name, command, env | {"OMP_NUM_THREADS": str(THREADS.get(name, 1))}, folder)
            about = drivers[name].ready()
            if about is not None:
                rows[name], versions[name] = [], about["version"]
                print(f"  {name}: {about['version']}", flush=True)
        for i in range(args.rounds):
            for name in list(rows):
                row = drivers[name].work()
                if row is None:
                    del rows[name]
                    continue
                row["turns_per_s"] = row["turns"] / row.get("loop_s", row["s"])
                rows[name].append(row)
                print(f"  round {i + 1}: {name} {row['turns_per_s']:.1f} turns/s  {json.dumps(row)}", flush=True)
    finally:
        for driver in drivers.values():
            driver.close()
    return rows, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--trl-turns", type=int, default=4, help="0: without TRL")
    parser.add_argument("--peers", type=Path, default=HERE.parent / ".peers", help="folder of the peers' environments")
    parser.add_argument("--history", type=int, default=2048, help="tokens; 0: without long histories")
    parser.add_argument("--driver", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver:
        name, model, *sizes = args.driver
        keep_stdout_for_answers()
        torch.set_num_threads(1)
        work(name, model, *map(int, sizes))
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows, versions = measure(args, Path(folder))
    norms = {name: rows[name][0]["grad_norm"] for name in UPDATES if rows.get(name)}
    if len(norms) == 2 and abs(norms["shared"] / norms["unshared"] - 1) > 1e-3:
        raise SystemExit(f"the gradients differ: {norms}")
    speed = {name: statistics.median(r["turns_per_s"] for r in rs) for name, rs in rows.items() if rs}

    def versus(peer: str, ours: str = "ours") -> float | None:
        return round(speed[ours] / speed[peer], 2) if {ours, peer} <= set(speed) else None

    result = {
        "vs_lockstep": versus("lockstep"),
        "engine_busy_frac": round(statistics.median(r["busy"] for r in rows["ours"]), 3) if "ours" in speed else None,
        "vs_trl": versus("trl"),
        "vs_no_reuse": versus("no_reuse", "long"),
        "vs_unshared": versus("unshared", "shared"),
        "turns_per_s": {name: round(s, 1) for name, s in speed.items()},
        "conversations": args.conversations,
        "turns": args.turns,
        "trl_turns": args.trl_turns,
        "history": args.history,
        "versions": versions,
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
