"""The child process: loads the reward functions once, then answers calls. `python -m distflow.reward.server`.

It speaks lines of JSON over a socket of its own; whatever the functions print goes to stderr.
"""

import asyncio
import inspect
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distflow.errors import DistflowError, cut
from distflow.flow.importing import load
from distflow.reward import leash
from distflow.reward.signature import Failure, Function, Result, Signature, recognise, results_of


class Scorer:
    """The functions of a pool, loaded. Coroutines all run in one event loop, so that a function may keep a client."""

    def __init__(self, functions: list[dict[str, Any]], base: Path) -> None:
        self.functions: list[tuple[Function, Signature, Mapping[str, Any]]] = []
        for f in functions:
            fn = load(f["call"], f"reward '{f['name']}'", base)
            signature = recognise(fn, f"reward '{f['name']}' ({f['call']})", f["args"])
            if callable(prepare := getattr(fn, "prepare", None)):  # what it needs, it may look for now
                prepare(**f["args"])
            self.functions.append((fn, signature, f["args"]))
        self._loop: asyncio.Runner | None = None

    def results(self, function: int, arguments: Mapping[str, Any], samples: int) -> list[Result]:
        fn, signature, args = self.functions[function]
        try:
            value = fn(**{**arguments, **args})
            if inspect.isawaitable(value):
                self._loop = self._loop or asyncio.Runner()
                value = self._loop.run(_wait(value))
            return results_of(signature, value, samples)
        except BaseException as e:  # it is told, and sys.exit() is no reason to start anew
            return [Failure(f"raised {_told(e, fn)}")] * samples


async def _wait(value: Any) -> Any:
    return await value


def _told(error: BaseException, fn: Function) -> str:
    """Type, message, and the line of the user's own file, also where a library raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    inner = inspect.unwrap(fn)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    own = [f for f in frames if code and f.filename == code.co_filename] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    try:
        message = cut(str(error), 300)
    except Exception:  # an error of the user's own may fail even at this
        message = ""
    return f"{type(error).__name__}{': ' * bool(message)}{message}{place}"


def serve(channel: socket.socket) -> None:
    """Answer until the other end is closed."""
    lines = channel.makefile("rb")

    def tell(message: dict[str, Any]) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    setup = json.loads(next(lines))
    sys.path[:] = setup["path"]  # what the parent can import, we can
    try:
        scorer = Scorer(setup["functions"], Path(setup["base"]))
    except DistflowError as e:
        tell({"broken": str(e)})
        return
    tell({"ready": [asdict(signature) for _, signature, _ in scorer.functions]})
    for line in lines:
        call = json.loads(line)
        began = time.perf_counter()
        results = scorer.results(call["function"], call["arguments"], call["samples"])
        tell({"results": [_packed(r) for r in results], "seconds": time.perf_counter() - began})


def _packed(result: Result) -> str | list[Any]:
    return result.what if isinstance(result, Failure) else [result.value, result.extra]


def main() -> None:
    channel, life, parent = map(int, sys.argv[1:])
    leash.hold(life, parent)

    def let_go() -> None:  # what a function forks must neither speak for us nor keep the line open when we are gone
        os.close(channel)
        os.close(life)

    os.register_at_fork(after_in_child=let_go)
    serve(socket.socket(fileno=channel))


if __name__ == "__main__":
    main()
