"""Reward functions that return anything, raise anything, or end their process; with verl's and TRL's signature."""

import contextlib
import math
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np

from distflow.batch.batch import Batch
from distflow.batch.context import Context
from distflow.observe.metrics import StepMetrics
from distflow.reward.reward import Reward
from fuzz.harness import Case

# The response is an expression that the function evaluates and returns: one file serves all cases.
FILE = """
import asyncio, decimal, fractions, json, math, os, signal, sys, threading, time

class Odd:
    def __repr__(self):
        raise ValueError("no repr")

class BadFloat(float):
    def __float__(self):
        raise ZeroDivisionError("no float")

class BadDict(dict):
    def __getitem__(self, key):
        raise KeyError("not " * 100)
    def items(self):
        raise RuntimeError("no items")

class BadList(list):
    def __len__(self):
        raise MemoryError("no len")

class BadError(Exception):
    def __str__(self):
        raise RuntimeError("no str")

class Array:
    shape = ()
    def item(self):
        raise OSError("no item")
    def tolist(self):
        raise OSError("no tolist")

def deep(n):
    nested = []
    for _ in range(n):
        nested = [nested]
    return nested

def fail(error):
    raise error

def recurse():
    return recurse()

async def later(value):
    await asyncio.sleep(0)
    return value

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return eval(solution_str)

def trl(completions, **kwargs):
    return eval(completions[0])
"""
ATOMS = (
    "1", "0.5", "True", "None", "''", "'1'", "'x' * 10**6", "math.nan", "math.inf", "-math.inf", "1e39", "10**5000",
    "1j", "b'x'", "[]", "{}", "()", "object()", "Odd()", "BadFloat(1)", "BadDict(score=1)", "BadList([1])",
    "Array()", "print", "later(1)", "later(None)", "(x for x in [1])", "iter([1])", "range(3)", "{1}",
    "decimal.Decimal(1)", "type", "...", "fractions.Fraction(1, 3)", "fractions.Fraction(10**400, 3)", "lambda: 1",
    "{'score': 1}", "{'Score': 1}", "deep(50)", "{'score': 1, 'x': math.nan, 'y': 'z', 3: 4, 'b': 10**400, None: 1}",
    "{'score': None}", "{'score': {'score': 1}}", "{str(i): i for i in range(20000)} | {'score': 1}",
    "{'score': 1, 'k' * 10**5: 1}", "{'score': 1, '\\ud800': 1}",
    "[1.0]", "[1, 2]", "[1] * 10**5", "[None]", "['x']", "[[1]]", "[math.nan]", "[True]", "[Odd()]", "(1,)",
    "deep(5000)", "fail(ValueError('two\\nlines'))", "fail(ValueError('x' * 10**6))", "fail(BadError())",
    "fail(KeyError())", "1 / 0", "fail(KeyboardInterrupt())", "fail(GeneratorExit())", "fail(StopIteration())",
    "fail(BaseException('\\ud800'))", "sys.exit()", "sys.exit(3)", "sys.exit('bye')", "recurse()",
    "print('x' * 10**6) or 1", "fail(MemoryError())",
    "threading.Thread(target=time.sleep, args=(0.01,)).start() or 1", "sys.stdout.close() or 1",
    "os.environ.clear() or 1", "fail(asyncio.CancelledError())", "fail(SyntaxError('x'))",
    "fail(UnicodeDecodeError('utf-8', b'x', 0, 1, 'y'))", "1 +",
)  # fmt: skip
MESSAGES = (
    "junk", "3", "\\xff", "[" * 9999, '{"ready": []}', '{"results": [], "seconds": 0.1}', '{"results": 3}',
    '{"results": [5], "seconds": 0.1}', '{"results": [[1, 2, 3]], "seconds": 0.1}',
    '{"results": [["x", {}]], "seconds": 0.1}',
)  # fmt: skip
SEND = "os.write(int(sys.argv[1]), b'{}\\n') and 1"  # to the channel of the process
DEADLY = (
    "os._exit(0)", "os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os.closerange(3, 100) or 1",
    "time.sleep(99)", "sum(iter(int, 1))", "setattr(json, 'dumps', None) or 1", "os.kill(os.getpid(), signal.SIGSTOP)",
    *(SEND.replace("{}", message) for message in MESSAGES),
)  # fmt: skip
BAD_FILES = (
    "", "x = 3", "def x(:", "raise ValueError('no')", "import sys; sys.exit(3)", "import nowhere", "x = None",
    "def x(): ...", "def x(a, b): ...", "def x(solution_str, other): ...", "x = len", "class x: ...", "\x00",
    "def x(*, completions, prompt_column): ...", "x = type('T', (), {'__call__': 3})()", "import os; os._exit(5)",
    "def x(solution_str, /): ...", "def x(*solution_str): ...", "async def x(solution_str): return {}",
    "class X:\n    def __getattr__(self, n): raise OSError('no')\nx = X()", "def x(solution_str): yield 1",
    "from functools import partial\nx = partial(print)", "x = property()", "import threading; x = threading.Lock()",
)  # fmt: skip


class Rewards:
    name, quick, full = "rewards", 80, 1200

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "functions.py").write_text(FILE)
        self.rewards = {
            (name, on_failure): Reward([{"call": f"functions.py:{name}"}], 1, 1.0, on_failure, base=folder)
            for name in ("verl", "trl")
            for on_failure in ("error", 0.5)
        }

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

    def case(self, rng: Random, number: int) -> Case:
        if number % 40 == 7:
            return self._loading(rng, number // 40)
        name, on_failure = rng.choice(list(self.rewards))
        programs = [rng.choice(ATOMS) for _ in range(rng.choice((1, 1, 2, 3)))]
        if number % 25 == 3:
            programs[0] = DEADLY[number // 25 % len(DEADLY)]
        batch = Batch(
            np.arange(len(programs)),
            np.arange(len(programs)),
            {"prompt": ["p"] * len(programs), "response": programs, "answer": [1] * len(programs)},
        )

        def run() -> None:
            context = cast(
                Context, SimpleNamespace(step=1, steps=1, metrics=StepMetrics(), is_dp_leader=True, held_out=False)
            )
            scores = self.rewards[name, on_failure].score(batch, context)["score"]
            assert len(scores) == len(programs)
            assert all(math.isfinite(s) for s in scores.tolist())

        names = (f"sample 0: reward '{name}' (functions.py:{name})", f"reward '{name}' (functions.py:{name})")
        return Case(f"{name} {on_failure} {programs}", run, names, limit_s=30, limit_memory=False)

    def _loading(self, rng: Random, number: int) -> Case:
        text = BAD_FILES[number % len(BAD_FILES)]
        file = f"bad{number}.py"
        (self.folder / file).write_text(text)

        def run() -> None:
            with contextlib.closing(Reward([{"call": f"{file}:x"}], 1, 1.0, base=self.folder)) as reward:
                reward.score_one({"prompt": "p", "response": "r"})

        return Case(f"loads {text!r}", run, ("reward 'x'",), limit_s=30, limit_memory=False)
