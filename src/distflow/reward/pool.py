"""A pool of processes that run reward functions; one that hangs or dies is replaced without disturbing the others."""

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
from distflow.reward.process import BrokenChannelError, Process
from distflow.reward.signature import Failure, Result, Score, Signature

_FAST_S = 0.005  # calls that take less are sent in batches
_BATCH = 16  # fast calls a process may hold at once
_ATTEMPTS = 2  # a process may die through no fault of the sample, so each sample gets a second one
_FOREIGN_MESSAGE = "wrote to the channel of its process; write only to files that the function itself has opened"
_FAILED_STARTS = 3  # processes that may die in a row while loading the functions


@dataclass(frozen=True)
class Call:
    """One call of a function: for one sample (verl) or for several (TRL)."""

    function: int
    arguments: Mapping[str, Any]
    samples: int = 1


@dataclass(frozen=True)
class _Finished:
    call: int
    results: list[Result]
    seconds: float


@dataclass(frozen=True)
class _Lost:
    """A call whose process died, or was killed at the time limit, and the calls that were queued behind it."""

    call: int
    queued: tuple[int, ...]
    reason: str
    died: bool


class Pool:
    """Starts its processes at once, in the background; each can run any of the functions.

    A call may take `time_limit_s`, and loading the functions `load_limit_s`. Not thread-safe.
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
        specs = [{"name": f.name, "call": f.call, "args": dict(f.args)} for f in functions]
        self._setup = _encode({"path": list(map(str, sys.path)), "base": str(base.absolute()), "functions": specs})
        self._signatures: list[Signature] = []
        self._seconds = [math.inf] * len(functions)  # duration of the latest call of each function
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._processes: list[Process] = []
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._processes, self._selector)
        for _ in range(processes):
            self._start()

    def close(self) -> None:
        """Kills all processes and everything they have started."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    @property
    def signatures(self) -> list[Signature]:
        """The signature of each function; waits until a process has loaded them and raises if they do not load."""
        while not self._signatures:
            self._wait()
        return self._signatures

    def run(self, calls: Sequence[Call]) -> Generator[tuple[int, list[Result]], None, None]:
        """Yields (index of a call, results of its samples) as calls finish. Closing it early drops the rest."""
        pending, remaining, deaths = deque(range(len(calls))), len(calls), [0] * len(calls)
        try:
            while remaining:
                self._assign(pending, calls)
                for outcome in self._wait():
                    call = calls[outcome.call]
                    if isinstance(outcome, _Finished):
                        self._seconds[call.function] = outcome.seconds
                        results = outcome.results
                        if len(results) != call.samples:
                            results = [Failure(_FOREIGN_MESSAGE)] * call.samples
                    else:
                        pending.extendleft(reversed(outcome.queued))
                        deaths[outcome.call] += outcome.died
                        if outcome.died and deaths[outcome.call] < _ATTEMPTS:
                            pending.appendleft(outcome.call)
                            continue
                        results = [Failure(outcome.reason)] * call.samples
                    remaining -= 1
                    yield outcome.call, results
        finally:
            for process in [p for p in self._processes if p.calls]:
                self._replace(process)

    def _assign(self, pending: deque[int], calls: Sequence[Call]) -> None:
        """Gives each process its next call, and several at once of fast ones, to save round trips."""

        def fast(i: int) -> bool:
            return self._seconds[calls[i].function] < _FAST_S

        ready = [p for p in self._processes if p.ready]
        for held in range(_BATCH):
            for process in ready:
                if not pending or (held and not fast(pending[0])):
                    break
                if len(process.calls) == held and (not held or fast(process.calls[0])):
                    if not held:
                        process.deadline = time.monotonic() + self.time_limit_s
                    process.queue(self._encode_call(calls[pending[0]]))
                    process.calls.append(pending.popleft())
        for process in ready:
            process.flush()
            self._select_events(process)

    def _encode_call(self, call: Call) -> bytes:
        try:
            return _encode(vars(call))
        except TypeError:
            name, error = next((k, e) for k, v in call.arguments.items() if (e := _encoding_error(v)))
            raise RewardError(
                f"reward '{self.functions[call.function].name}': column '{name}' cannot be passed to it: {error};"
                " store text, numbers, or lists and dicts of these in the data file"
            ) from None

    def _wait(self) -> list[_Finished | _Lost]:
        """Waits for the next event; returns the calls that it ended."""
        outcomes: list[_Finished | _Lost] = []
        deadlines = [p.deadline for p in self._processes if not p.idle]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            process: Process = key.data
            process.flush()
            self._select_events(process)
            try:
                for message in process.receive():
                    outcomes += self._handle_message(process, message)
            except BrokenChannelError:
                outcomes += self._handle_death(process)
        now = time.monotonic()
        for process in [p for p in self._processes if not p.idle and p.deadline <= now]:
            if not process.ready:
                raise RewardError(
                    f"{self._names} did not load within {self.load_limit_s:g} s;"
                    " check what the file waits for when it is imported"
                )
            reason = f"took longer than {self.time_limit_s:g} s; raise `reward.time_limit_s` if it needs more time"
            outcomes += self._replace(process, reason, died=False)
        return outcomes

    def _handle_message(self, process: Process, message: Any) -> list[_Finished]:
        match message:
            case {"ready": list(signatures)} if not process.ready:
                self._signatures = [
                    Signature(s["kind"], tuple(s["parameters"]), tuple(s["required"]), s["var_keyword"])
                    for s in signatures
                ]
                process.ready, self._failed_starts = True, 0
                return []
            case {"load_error": str(error)}:
                raise RewardError(error)
            case {"results": list(results), "seconds": float(seconds)} if process.calls and all(map(_valid, results)):
                process.deadline = time.monotonic() + self.time_limit_s  # its next call starts now
                call = process.calls.popleft()
                return [_Finished(call, [Failure(r) if isinstance(r, str) else Score(*r) for r in results], seconds)]
        raise BrokenChannelError  # this message did not come from our server

    def _handle_death(self, process: Process) -> list[_Lost]:
        ending = process.ending()
        if not process.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise RewardError(
                    f"{self._names}: {_FAILED_STARTS} processes in a row died while loading, the last one {ending};"
                    " see what they wrote to stderr"
                )
        return self._replace(process, f"ended its process in both attempts: it {ending}", died=True)

    def _replace(self, process: Process, reason: str = "", died: bool = False) -> list[_Lost]:
        """Kills a process and starts another; returns the call it was running, if any."""
        self._selector.unregister(process.channel)
        self._processes.remove(process)
        process.kill()
        self.restarts += 1
        self._start()
        if not process.calls:
            return []
        call, *queued = process.calls
        return [_Lost(call, tuple(queued), reason, died)]

    def _start(self) -> None:
        process = Process(self._setup, time.monotonic() + self.load_limit_s)
        self._processes.append(process)
        self._selector.register(process.channel, selectors.EVENT_READ, process)
        self._select_events(process)

    def _select_events(self, process: Process) -> None:
        """Waits for readability always, and for writability only while something is queued."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.sending else 0)
        if self._selector.get_key(process.channel).events != events:
            self._selector.modify(process.channel, events, process)

    @property
    def _names(self) -> str:
        return ", ".join(f"reward '{f.name}' ({f.call})" for f in self.functions)


def _valid(result: Any) -> bool:
    """Whether it is a failure's reason, or a score with further numbers."""
    match result:
        case str() | [int() | float() | None, dict(), dict()]:
            return True
    return False


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _encoding_error(value: Any) -> str | None:
    try:
        json.dumps(value)
    except TypeError as e:
        return str(e)
    return None


def _close(owner: int, processes: list[Process], selector: selectors.BaseSelector) -> None:
    if os.getpid() != owner:  # a fork of the owner is exiting
        return
    for process in processes:
        process.kill()
    processes.clear()
    selector.close()
