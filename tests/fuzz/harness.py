"""Runs random input through the code: it must be accepted, or refused with one error that names it.

Every case follows from its kind and its number, so that a failure can be reproduced: `case(kind, number)`.
"""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from distflow.errors import DistflowError

MAX_MESSAGE = 3000  # characters
MAX_MEMORY = 2 << 30  # bytes that one case may allocate
SLOW_S = 2.0


@dataclass(frozen=True)
class Case:
    """`names`: one of these must be in the message if the input is refused. `description` is shown with a failure."""

    description: str
    run: Callable[[], Any]
    names: tuple[str, ...]
    limit_s: float = 20.0
    limit_memory: bool = True


class Kind(Protocol):
    """A kind of input; `quick` and `full` are numbers of cases."""

    name: str
    quick: int
    full: int

    def __init__(self, folder: Path) -> None: ...
    def case(self, rng: Random, number: int) -> Case: ...
    def close(self) -> None: ...


@dataclass
class Report:
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    slow: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        return f"{self.cases} cases, {self.refused} refused, {len(self.failures)} failures, {self.seconds:.1f} s"


class TooLongError(BaseException):
    """Not an Exception, so that no code on the way catches it."""


def fuzz(kind: Kind, count: int, first: int = 0) -> Report:
    report = Report()
    began = time.perf_counter()
    for number in range(first, first + count):
        case = kind.case(Random(f"{kind.name} {number}"), number)
        start = time.perf_counter()
        problem, refused = _try(case)
        seconds = time.perf_counter() - start
        report.cases += 1
        report.refused += refused
        if seconds > SLOW_S:
            report.slow.append(f"{kind.name} {number}: {seconds:.1f} s: {case.description[:200]}")
        if problem:
            report.failures.append(f"{kind.name} {number}: {case.description[:500]}\n    {problem}")
    report.seconds = time.perf_counter() - began
    return report


def _try(case: Case) -> tuple[str | None, bool]:
    """Returns what is wrong, if anything, and whether the input was refused."""
    try:
        with _limits(case):
            case.run()
    except DistflowError as e:
        return _problem_with(str(e), case.names), True
    except TooLongError:
        return f"took longer than {case.limit_s:g} s", False
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return f"{type(e).__name__}: {str(e)[:300]} ({_location(e)})", False
    return None, False


def _problem_with(message: str, names: tuple[str, ...]) -> str | None:
    if not message.strip():
        return "the message is empty"
    if not any(name in message for name in names):
        return f"the message names nothing of {names[:6]}: {message[:300]}"
    if len(message) > MAX_MESSAGE:
        return f"the message has {len(message)} characters: {message[:300]}"
    return None


def _location(error: BaseException) -> str:
    trace, places = error.__traceback__, []
    while trace:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ← ".join(places[::-1][:8])


@contextmanager
def _limits(case: Case) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if case.limit_memory:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, case.limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
