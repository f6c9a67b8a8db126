"""Configs: valid ones with something changed, texts that are hardly YAML, overrides; loaded and planned."""

import json
import os
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distflow.errors import DistflowError
from distflow.plan.svg import svg
from distflow.plan.table import render
from distflow.run.program import Program
from fuzz.harness import Case
from fuzz.junk import TEXTS, as_yaml, damaged, junk, misspelt, mutate, places

CODE = """
from distflow import flow, node

number = 3

@node
def length(batch, scale=1.0, table=None):
    return [len(t) for t in batch["text"]]

def anything(batch, **constants): ...

class Judge:
    def __init__(self, strict=False): ...
    @node(type="train")
    def score(self, batch, ctx, mini_batches=1): ...

@flow
def measure(data, judge, *, parts=1):
    judge.score(length(data["text"]), mini_batches=parts)

@flow
def count(data, *, times=1, scale=1.0):
    for _ in range(min(times, 3)):
        length(data["text"], scale=scale)
"""
ROW = {"text": "a", "prompt": "b", "response": "c", "chosen": "d", "rejected": "e", "answer": 1}
MODEL = {"arch": "qwen2", "hidden": 32, "layers": 1, "heads": 2}
LEARNS = {"data": {"files": "prompts.jsonl", "batch": 8}, "model": MODEL, "train": {"lr": 1e-3, "lora": {"rank": 4}}}
SPLIT = {
    "ranks": {"left": "0%-50%", "right": "50%-"},
    "default": {"ranks": "left"},
    "roles": {"actor": {"ranks": "right", "tp": 1}},
}
LIST = [
    {"id": "length", "call": "own.py:length", "reads": ["text"], "params": {"scale": 2.0, "table": {"a": [1, None]}}},
    {"id": "judge", "call": "judge.score", "deps": ["length", "data"], "params": {"mini_batches": 2}},
    {"id": "rest", "call": "own.py:anything", "after": "judge", "writes": ["x", "y"], "params": {"any": "thing"}},
]
VALID: tuple[dict[str, Any], ...] = (
    {"flow": "own.py:count", "data": {"files": "rows.jsonl", "batch": 4}, "bytes": {"text": 10}, "algo": {"times": 2}},
    {
        "flow": "own.py:measure",
        "data": {"files": ["rows.jsonl"], "batch": 4, "repeat": 2, "rename": {"answer": "truth"}},
        "roles": {"judge": {"call": "own.py:Judge", "args": {"strict": True}}},
        "algo": {"parts": 2},
        "placement": {"ranks": {"one": 0}, "nodes": {"judge.score": {"ranks": "one"}}},
        "workers": 2,
    },
    {"flow": LIST, "data": "rows.jsonl", "roles": {"judge": "own.py:Judge"}, "seed": 3, "wait_limit_s": 5, "name": "l"},
    {"flow": "grpo", "reward": "own.py:length", "placement": SPLIT, "workers": 2, "rollout": {"n": 4}, **LEARNS},
    {
        "flow": "dapo",
        "reward": {"functions": ["own.py:length"], "on_failure": 0},
        "algo": {"max_gen_batches": 3},
        **LEARNS,
    },
    {"flow": "ppo", "reward": {"model": MODEL}, "critic": {"model": "here", "betas": [0.9, 0.99]}, **LEARNS},
    LEARNS | {"flow": "sft", "eval": {"files": "rows.jsonl", "n": 2}, "reward": "own.py:length", "data": "rows.jsonl"},
    {"flow": "dpo", "steps": 3, "run_dir": "runs/x"} | LEARNS,
)
PIECES = (
    "!!int ''", "!!int x", "!!bool x", "!!float x", "!!timestamp x", "!!binary x", "!!set {a}", "!!omap [a: 1]",
    "!!null", "!!python/object/apply:os.getcwd []", "!x y", "&a [*a]", "&a {b: *a}", "*none", "<<: 3", "<<: [1]",
    "0x" + "f" * 5000, "9" * 5000, "1:99999999:3", "2025-13-45", "1_000", "0o9", ".nan", "-.inf", "? [1]",
    "%YAML 9.9", "---", "...", "\t", "|", ">-", "\ufeff", "\x85", "\u2028", "'", '"\\ud800"', '"\\xz"',
    "[" * 700, "{a: " * 700, "- " * 700, "# ",
)  # fmt: skip


def bomb(kind: str) -> str:
    """Returns YAML whose aliases expand to nine times more values with every line."""
    lines = ["b0: &b0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 12):
        inner = ", ".join([f"*b{i - 1}"] * 9)
        lines.append(f"b{i}: &b{i} [{inner}]" if kind == "list" else f"b{i}: &b{i} {{a: *b{i - 1}, b: *b{i - 1}}}")
    if kind == "map":
        lines += [f"b{i}: &b{i} {{a: *b{i - 1}, b: *b{i - 1}}}" for i in range(12, 60)]
    return "\n".join(lines)


class Configs:
    name, quick, full = "configs", 200, 5000

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "own.py").write_text(CODE)
        (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
        (folder / "prompts.jsonl").write_text(json.dumps({k: v for k, v in ROW.items() if k != "response"}) + "\n")
        (folder / "empty.jsonl").write_text("")
        (folder / "bad.jsonl").write_text('{"text": "a"}\n[1]\n')
        (folder / "broken.py").write_text("def x(:\n")
        (folder / "raises.py").write_text("raise ValueError('two\\nlines')\n")
        (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
        (folder / "nul.py").write_bytes(b"x = 1\x00\n")
        (folder / "folder").mkdir()
        os.mkfifo(folder / "pipe.jsonl")
        pq.write_table(pa.table({"text": [b"\xff"]}), folder / "odd.parquet")

    def close(self) -> None:
        pass

    def case(self, rng: Random, number: int) -> Case:
        path = self.folder / "run.yaml"
        doc = deepcopy(rng.choice(VALID))
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            mutate(doc, rng)
        text = as_yaml(doc, allow_unicode=rng.random() < 0.5)
        data = self._text(text, rng).encode(errors="surrogatepass")
        if rng.random() < 0.15:
            data = damaged(data, rng)
        if rng.random() < 0.02:
            data = rng.choice((text.encode("utf-16"), rng.randbytes(100), b"", b"\x00" * 50))
        path.write_bytes(data)
        overrides = [self._override(doc, rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
        workers = rng.choice((1, 1, 2, 3, 4, 8))

        def run() -> None:
            program = self._load(path, overrides)
            plan = program.plan(program.config.workers or workers)
            json.dumps(plan.to_json())
            assert plan.hash
            render(plan)
            if plan.workers <= 8 and number % 7 == 0:
                svg(plan)
            program.dataset(plan)[0]
            if program.config.eval:
                program.eval_plan(plan.workers, 3)

        keys = ("flow", "data", "algo", "node", "role", "placement", "workers", "bytes", "override", "eval", "reward")
        description = f"{overrides} {data[:2000]!r}"
        return Case(description, run, (str(path), str(self.folder), *keys))

    def _load(self, path: Path, overrides: list[str]) -> Program:
        try:
            return Program.load(path, overrides)
        except DistflowError as e:
            if str(path) not in str(e) and "override '" not in str(e):
                raise AssertionError(f"names neither file nor override: {e}") from e
            raise

    def _text(self, text: str, rng: Random) -> str:
        lines = text.splitlines()
        match rng.randrange(16):
            case 0:
                at = rng.randrange(len(lines) + 1)
                lines.insert(at, rng.choice(("", "  ")) + rng.choice(PIECES))
            case 1:
                at = rng.randrange(len(lines))
                lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(PIECES)
            case 2:
                lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            case 3:
                lines = [*bomb(rng.choice(("list", "map"))).splitlines(), *lines]
                at = rng.randrange(len(lines))
                lines[at] = lines[at].partition(":")[0] + ": *b" + str(rng.choice((1, 9, 11)))
            case 4:
                at = rng.randrange(len(lines))
                lines[at] = lines[at].replace(rng.choice((" ", ":", "-", "a")), rng.choice(("", "\t", "  ", "{", "&")))
        return "\n".join(lines)

    def _override(self, doc: Any, rng: Random) -> str:
        paths = places(doc) or [("flow",)]
        key = ".".join(map(str, rng.choice(paths)))
        if rng.random() < 0.3:
            key = misspelt(key, rng)
        value = rng.choice((*TEXTS, *PIECES, "3", "[1, 2]", "{a: 1}"))
        if rng.random() < 0.3:
            value = as_yaml(junk(rng), default_flow_style=True)
        return rng.choice((f"{key}={value}", f"{key}={value}", key, f"={value}", f"{key}.x.y={value}"))
