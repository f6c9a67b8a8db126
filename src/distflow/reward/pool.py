"""Some processes that run reward functions; one that hangs or dies is replaced, and the rest goes on."""

import json
import math
import os
import selectors
import sys
import time
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.reward.errors import RewardError
from distflow.reward.function import RewardFunction
from distflow.reward.process import BrokenLineError, Process
from distflow.reward.signature import Failure, Result, Score, Signature

_QUICK_S = 0.005  # a call that takes less is quick
_AHEAD = 16  # quick calls a process is given at once
_TRIES = 2  # a process may die through no fault of the sample: only what kills two is to blame
_STARTS = 3  # processes that may die in a row before one has loaded the functions


@dataclass(frozen=True)
class Call:
    """One call of a function: for one sample (verl) or for several (TRL)."""

    function: int
    arguments: Mapping[str, Any]
    samples: int = 1


@dataclass(frozen=True)
class _Done:
    call: int
    results: list[Result]
    seconds: float


@dataclass(frozen=True)
class _Lost:
    """The process is no more: it died by itself, or its time was up."""

    call: int
    not_begun: tuple[int, ...]
    how: str
    died: bool


class Pool:
    """Processes start at once, in the background; each can run any of the functions.

    A call may take `time_limit_s`, and loading the functions `load_limit_s`. Not for several threads at once.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        processes: int,
        time_limit_s: float,
        base: Path = Path(),
        load_limit_s: float = 300.0,
    ) -> None:
        self.functions, self.time_limit_s, self.load_limit_s = functions, time_limit_s, load_limit_s
        self.restarts = 0  # processes replaced so far
        told = [{"name": f.name, "call": f.call, "args": dict(f.args)} for f in functions]
        self._setup = _line({"path": list(map(str, sys.path)), "base": str(base.absolute()), "functions": told})
        self._signatures: list[Signature] = []
        self._seconds = [math.inf] * len(functions)  # what the last call of each took
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._processes, self._selector)
        for _ in range(processes):
            self._start()

    def close(self) -> None:
        """Kill all processes and what they have started."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    @property
    def signatures(self) -> list[Signature]:
        """Of each function; waits until a process has loaded them, and raises what is wrong with them."""
        while not self._signatures:
            self._turn()
        return self._signatures

    def run(self, calls: Sequence[Call]) -> Generator[tuple[int, list[Result]], None, None]:
        """The number of a call and the results of its samples, as they come in. Closing it early drops the rest."""
        waiting, left, deaths = deque(range(len(calls))), len(calls), [0] * len(calls)
        try:
            while left:
                self._deal(waiting, calls)
                for end in self._turn():
                    call = calls[end.call]
                    if isinstance(end, _Done):
                        self._seconds[call.function] = end.seconds
                        results = end.results
                        if len(results) != call.samples:
                            results = [Failure("wrote to the line of its process, which is not its own")] * call.samples
                    else:
                        waiting.extendleft(reversed(end.not_begun))
                        deaths[end.call] += end.died
                        if end.died and deaths[end.call] < _TRIES:
                            waiting.appendleft(end.call)
                            continue
                        results = [Failure(end.how)] * call.samples
                    left -= 1
                    yield end.call, results
        finally:
            for process in [p for p in self._processes if p.calls]:
                self._replace(process)

    def _deal(self, waiting: deque[int], calls: Sequence[Call]) -> None:
        """To each process its next call, and of quick ones some ahead: to wait behind a slow one costs them little."""

        def quick(i: int) -> bool:
            return self._seconds[calls[i].function] < _QUICK_S

        ready = [p for p in self._processes if p.ready]
        for held in range(_AHEAD):
            for process in ready:
                if not waiting or (held and not quick(waiting[0])):
                    break
                if len(process.calls) == held and (not held or quick(process.calls[0])):
                    if not held:
                        process.deadline = time.monotonic() + self.time_limit_s
                    process.queue(self._request(calls[waiting[0]]))
                    process.calls.append(waiting.popleft())
        for process in ready:
            process.flush()
            self._watch(process)

    def _request(self, call: Call) -> bytes:
        try:
            return _line(vars(call))
        except TypeError:
            name, why = next((k, w) for k, v in call.arguments.items() if (w := _unsendable(v)))
            raise RewardError(
                f"reward '{self.functions[call.function].name}': cannot be given '{name}' of the data: {why};"
                " write text, numbers, or lists and dicts of these to the data file"
            ) from None

    def _turn(self) -> list[_Done | _Lost]:
        """Wait until something happens; the calls that are over by it."""
        over: list[_Done | _Lost] = []
        limited = [p.deadline for p in self._processes if not p.idle]
        timeout = max(0.0, min(limited) - time.monotonic()) if limited else None
        for key, _ in self._selector.select(timeout):
            process: Process = key.data
            process.flush()
            self._watch(process)
            try:
                for message in process.receive():
                    over += self._hear(process, message)
            except BrokenLineError:
                over += self._bury(process)
        now = time.monotonic()
        for process in [p for p in self._processes if not p.idle and p.deadline <= now]:
            if not process.ready:
                raise RewardError(f"{self._names} did not load within {self.load_limit_s:g} s; what does it wait for?")
            how = f"took longer than {self.time_limit_s:g} s; if it may, raise `reward.time_limit_s`"
            over += self._replace(process, how, died=False)
        return over

    def _hear(self, process: Process, message: Any) -> list[_Done]:
        match message:
            case {"ready": list(signatures)} if not process.ready:
                self._signatures = [
                    Signature(s["kind"], tuple(s["takes"]), tuple(s["needs"]), s["open"]) for s in signatures
                ]
                process.ready, self._failed_starts = True, 0
                return []
            case {"broken": str(why)}:
                raise RewardError(why)
            case {"results": list(results), "seconds": float(seconds)} if process.calls and all(map(_sound, results)):
                process.deadline = time.monotonic() + self.time_limit_s  # of its next call, which begins now
                call = process.calls.popleft()
                return [_Done(call, [Failure(r) if isinstance(r, str) else Score(*r) for r in results], seconds)]
        raise BrokenLineError  # whoever said this, it is not our server

    def _bury(self, process: Process) -> list[_Lost]:
        how = process.ending()
        if not process.ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise RewardError(
                    f"{self._names}: {_STARTS} processes in a row ended while loading, the last one {how};"
                    " see what they wrote to stderr"
                )
        return self._replace(process, f"ended its process, twice: it {how}", died=True)

    def _replace(self, process: Process, how: str = "", died: bool = False) -> list[_Lost]:
        """Kill it and start another. The call it was busy with, if there was one, is lost."""
        self._selector.unregister(process.line)
        self._processes.remove(process)
        process.kill()
        self.restarts += 1
        self._start()
        if not process.calls:
            return []
        call, *not_begun = process.calls
        return [_Lost(call, tuple(not_begun), how, died)]

    def _start(self) -> None:
        process = Process(self._setup, time.monotonic() + self.load_limit_s)
        self._processes.append(process)
        self._selector.register(process.line, selectors.EVENT_READ, process)
        self._watch(process)

    def _watch(self, process: Process) -> None:
        """Wake up when it speaks, and while there is something to send when it has room."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.sending else 0)
        if self._selector.get_key(process.line).events != events:
            self._selector.modify(process.line, events, process)

    @property
    def _names(self) -> str:
        return ", ".join(f"reward '{f.name}' ({f.call})" for f in self.functions)


def _sound(result: Any) -> bool:
    """Why there is no score, or the score and further numbers."""
    match result:
        case str() | [int() | float() | None, dict()]:
            return True
    return False


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _unsendable(value: Any) -> str | None:
    try:
        json.dumps(value)
    except TypeError as e:
        return str(e)
    return None


def _close(owner: int, processes: list[Process], selector: selectors.BaseSelector) -> None:
    if os.getpid() != owner:  # a fork of it is at its end
        return
    for process in processes:
        process.kill()
    processes.clear()
    selector.close()
