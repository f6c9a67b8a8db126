"""A piece of work in a process of its own, done once for every line it is sent: so that rivals can take turns.

The scripts of bench/peers import this in environments of their own: nothing here but Python.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def serve(work: Callable[[], dict[str, Any]], about: dict[str, Any]) -> None:
    """Tell `about`, once all is warm; then `work` once for every line that comes, and tell its result and seconds."""
    print(json.dumps(about), file=_answers, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        spent = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(spent | result), file=_answers, flush=True)


def keep_stdout_for_answers() -> None:
    """Whatever else prints does so to standard error."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


_answers: TextIO = sys.stdout


class Served:
    """The other end. Where it has failed, answers are None and its last words are printed."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ready(self) -> dict[str, Any] | None:
        """What it says of itself, when it is warm."""
        return self._answer()

    def work(self) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            words = self.log.read_text(errors="replace").strip().splitlines()[-5:]
            print(f"  {self.name} failed:", *words, sep="\n    ", file=sys.stderr)
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer
