"""Programs with a time limit, and what they have said. Imports no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.util.parent import PARENT

_POLL_S = 0.1
_TAIL = 3000  # characters of what a program has printed that a report has
# For a process that is to see no accelerator of any vendor.
HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


class StepError(Exception):
    """A step has failed, or could not show its point; the message says why."""


class TooLongError(StepError):
    """A step took longer than it may."""


@dataclass
class Clock:
    """Counts down the time of a step."""

    limit_s: float

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.limit_s

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise TooLongError(f"it took longer than {self.limit_s:g} s")


def run_program(
    words: Sequence[str],
    log: Path,
    clock: Clock,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[int], object] = lambda pid: None,
) -> str:
    """Runs a program to its end and returns what it has printed; raises if it fails, or takes too long.

    `watch` is called with its process id, now and then.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        begun = file.tell()
        given = {**os.environ, PARENT: str(os.getpid()), **(environment or {})}
        process = subprocess.Popen(words, stdout=file, stderr=file, env=given, start_new_session=True)
        try:
            while process.poll() is None:
                clock.check()
                watch(process.pid)
                time.sleep(_POLL_S)
        finally:
            with suppress(ProcessLookupError):  # workers end with their launcher
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_bytes()[begun:].decode(errors="replace")
    if process.returncode:
        raise StepError(f"exit code {process.returncode}: {text[-_TAIL:].strip()}")
    return text


def ask(part: str, given: dict[str, Any], log: Path, clock: Clock, hidden: bool = False) -> dict[str, Any]:
    """Has a part of a step done in a process of its own, which sees no accelerator if it is `hidden`."""
    words = [sys.executable, "-m", "distflow.first_hour", part, json.dumps(given)]
    answer: dict[str, Any] = json.loads(run_program(words, log, clock, HIDDEN if hidden else None).splitlines()[-1])
    return answer
