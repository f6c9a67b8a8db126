"""A process that runs reward functions: loads them once, then serves calls. `userproc` forks it."""

import asyncio
import inspect
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distflow.errors import DistflowError, describe_error
from distflow.flow.importing import load
from distflow.reward.reward_log import RewardLog
from distflow.reward.signature import Function, NoScore, Result, Signature, parse_results, parse_signature
from distflow.userproc.channel import encode


class Scorer:
    """Loads and calls the functions of a pool. Coroutines share one event loop, so a function may keep a client."""

    def __init__(self, functions: list[dict[str, Any]], base: Path) -> None:
        self.functions: list[tuple[Function, Signature, Mapping[str, Any]]] = []
        for f in functions:
            fn = load(f["call"], f"reward '{f['name']}'", base)
            signature = parse_signature(fn, f"reward '{f['name']}' ({f['call']})", f["args"])
            if callable(prepare := getattr(fn, "prepare", None)):  # it may check its requirements before any sample
                prepare(**f["args"])
            self.functions.append((fn, signature, f["args"]))
        self._loop: asyncio.Runner | None = None

    def results(self, function: int, arguments: Mapping[str, Any], samples: int) -> list[Result]:
        fn, signature, args = self.functions[function]
        log = RewardLog(samples)
        try:
            value = fn(**{**log.arguments(signature), **_with_state(arguments), **args})
            if inspect.isawaitable(value):
                self._loop = self._loop or asyncio.Runner()
                value = self._loop.run(_await(value))
            return log.add_to(parse_results(signature, value, samples))
        except BaseException as e:  # sys.exit() in a function is a failure, too, and must not end the process
            return [NoScore(f"raised {_describe(e, fn)}")] * samples


def _with_state(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Makes TRL's `trainer_state` an object with attributes."""
    return {k: SimpleNamespace(**v) if k == "trainer_state" else v for k, v in arguments.items()}


async def _await(value: Any) -> Any:
    return await value


def _describe(error: BaseException, fn: Function) -> str:
    """Returns type, message and the line in the function's own file."""
    inner = inspect.unwrap(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    file = code.co_filename if code else None
    return describe_error(error, lambda filename: filename == file)


def prepare(arguments: Any) -> tuple[None, None]:
    """Loads nothing: each process does that for itself."""
    return None, None


def serve(shared: None, channel: socket.socket) -> None:
    """Loads the functions and answers calls until the pool closes the channel."""
    lines = channel.makefile("rb")

    def send(message: dict[str, Any]) -> None:
        channel.sendall(encode(message))

    setup = json.loads(next(lines))
    try:
        scorer = Scorer(setup["functions"], Path(setup["base"]))
    except DistflowError as e:
        send({"load_error": str(e)})
        return
    send({"ready": [asdict(signature) for _, signature, _ in scorer.functions], "pid": os.getpid()})
    for line in lines:
        call = json.loads(line)
        start = time.perf_counter()
        results = scorer.results(call["function"], call["arguments"], call["samples"])
        send({"results": [_to_json(r) for r in results], "seconds": time.perf_counter() - start})


def _to_json(result: Result) -> str | list[Any]:
    return result.reason if isinstance(result, NoScore) else [result.value, result.extra, result.columns]
