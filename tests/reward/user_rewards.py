"""Reward functions as users write them for verl and for TRL, without any import from distflow."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return 1.0 if solution_str.strip() == ground_truth else 0.0


def detailed(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    right = solution_str == ground_truth
    return {"score": right + bonus, "acc": right, "length": len(solution_str), "pred": solution_str, "bad": math.nan}


def echo(data_source, solution_str, ground_truth, extra_info):
    """Checks its arguments; the score is the response itself."""
    assert data_source == extra_info.get("source", ""), data_source
    assert ground_truth == extra_info.get("truth", "the truth"), ground_truth
    return int(solution_str)


async def later(solution_str, ground_truth):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def exact(completions, solution, **kwargs):
    return [1.0 if c == s else 0.0 for c, s in zip(completions, solution, strict=True)]


def chat(prompts, completions, **kwargs):
    assert all(p[-1]["role"] == "user" for p in prompts)
    return [float(len(c[0]["content"])) for c in completions]


def only_some(completions):
    return [None if c == "skip" else -0.5 for c in completions]


_client = asyncio.Semaphore(0)


async def with_client(prompts, completions, completion_ids, level):
    """A client that lives in one event loop, as HTTP clients do."""
    asyncio.get_running_loop().call_soon(_client.release)
    await _client.acquire()
    return [len(ids) + lv for ids, lv in zip(completion_ids, level, strict=True)]


def count_columns(completions, **kwargs):
    return [float(len(kwargs)) for _ in completions]


def confident(completions, logprobs, **kwargs):
    return [sum(p) for p in logprobs]


def slip(completions, **kwargs):
    """Returns what the first response names."""
    return {"few": [1.0], "text": "1.0", "nan": [1.0, math.nan, 2.0], "word": [1.0, "high", 2.0]}[completions[0]]


def call_raises(completions, **kwargs):
    raise KeyError("solution")


class Constant:
    def __call__(self, solution_str, ground_truth):
        return 0.5


constant = Constant()


def behave(data_source, solution_str, ground_truth, extra_info=None):
    """Does what the response says."""
    match solution_str.split():
        case ["print"]:
            print('{"results": [[0.0, {}]], "seconds": 0.0}')
            subprocess.run(["echo", "from a subprocess"], check=True)
            sys.stdout.flush()
        case ["raise"]:
            raise ValueError("no number\nin the response")  # line of the raise
        case ["library"]:
            int("seven")  # line of the library
        case ["sys.exit"]:
            sys.exit(3)
        case ["hang"]:
            time.sleep(1000)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["exit"]:
            os._exit(7)
        case ["crash"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["once", path]:  # dies unless it did so before
            if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case ["wait", path]:  # writes its pid and waits to be killed; the second time it returns at once
            if not Path(path).exists():
                Path(path).with_suffix(".new").write_text(str(os.getpid()))
                Path(path).with_suffix(".new").rename(path)
                time.sleep(1000)
        case ["after", path]:
            while not Path(path).exists():
                time.sleep(0.005)
        case ["family", path, end]:  # leaves child processes behind: one by exec, one by fork
            started = subprocess.Popen(["sleep", "1000"])
            forked = os.fork()
            if not forked:
                time.sleep(1000)
            Path(path).with_suffix(".new").write_text(f"{os.getpid()} {started.pid} {forked}")
            Path(path).with_suffix(".new").rename(path)
            if end == "exit":
                os._exit(7)
            if end == "busy":
                re.match("(a+)+$", "a" * 60 + "b")  # meanwhile no other thread and no Python signal handler runs
            if end == "hang":
                time.sleep(1000)
        case ["return", kind]:
            return {"nan": math.nan, "inf": 10**400, "none": None, "text": "1.0", "list": [1.0], "dict": {"acc": 1.0}}[
                kind
            ]
        case ["interfere", message]:  # writes to the channel of its process
            for fd in map(int, os.listdir("/proc/self/fd")):
                if os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.write(
                        fd, {"half": b'{"results": [[1.0', "rubbish": b"rubbish\n", "strange": b'{"a": 1}\n'}[message]
                    )
            time.sleep(1000)
        case ["close"]:
            os.closerange(3, 100)
        case ["torch"]:
            return float("torch" in sys.modules)
        case ["number", number]:
            return float(number)
    return 1.0


def unknown(text, answer):
    return 1.0


def needy(solution_str, ground_truth, threshold):
    return float(threshold)


NOT_A_FUNCTION = 3


def logs(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **kwargs):
    """Uses everything that TRL passes."""
    assert "trainer_state" not in kwargs
    log_metric("digits", sum(c.isdigit() for c in completions))
    log_metric("digits", 0)
    log_extra("upper", [c.upper() for c in completions])
    log_extra("object", [os] * len(completions))
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def logs_text(completions, log_metric):
    log_metric("digits", "many")


def logs_too_few(completions, log_extra):
    log_extra("upper", [])


async def never_applies(completions, **kwargs):
    return [None] * len(completions)
