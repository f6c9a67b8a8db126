"""A pool of processes that run reward functions; one that hangs or dies is replaced without disturbing the others."""

import json
import math
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from distflow.reward.errors import RewardError
from distflow.reward.function import RewardSpec
from distflow.reward.signature import NoScore, Result, Score, Signature
from distflow.userproc.channel import BrokenChannelError
from distflow.userproc.processes import Failed, Message, Processes
from distflow.userproc.server_process import UserCode

_FAST_S = 0.005  # calls that take less are sent in batches
_BATCH = 16  # fast calls a process may hold at once
_ATTEMPTS = 2  # a process may die through no fault of the sample, so each sample gets a second one
_FOREIGN_MESSAGE = "wrote to the channel of its process; write only to files that the function itself has opened"
_FAILED_STARTS = 3  # processes that may die in a row while loading the functions
_LARGEST = 1 << 28  # bytes of the results of a call


@dataclass(frozen=True)
class RewardCall:
    """One call of a function: for one sample (verl) or for several (TRL)."""

    function: int
    arguments: Mapping[str, Any]
    samples: int = 1


@dataclass
class _Worker:
    """A process: its pid once it has loaded the functions, and the calls it holds, of which it runs the first."""

    pid: int | None = None
    calls: deque[int] = field(default_factory=deque)


class Pool:
    """Starts its processes at once, in the background; each loads all functions, and can run any of them.

    A call may take `time_limit_s`, and loading the functions `load_limit_s`. Not thread-safe.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        processes: int,
        time_limit_s: float,
        base: Path = Path(),
        load_limit_s: float = 300.0,
    ) -> None:
        self.functions, self.time_limit_s, self.load_limit_s = functions, time_limit_s, load_limit_s
        self.restarts = 0  # processes replaced so far
        self._signatures: list[Signature] = []
        self._seconds = [math.inf] * len(functions)  # duration of the latest call of each function
        self._failed_starts = 0
        self._calls: Sequence[RewardCall] = ()  # that run now
        self._pending = deque[int]()  # calls that no process holds
        self._deaths = Counter[int]()  # call → processes that died in it
        self._done: list[tuple[int, list[Result]]] = []
        names = ", ".join(f"reward '{f.name}' ({f.call})" for f in functions)
        # Each process loads the functions by itself, after its fork: what they start in it, such as threads or a
        # device, would not survive a fork.
        self._setup = {
            "base": str(base.absolute()),
            "functions": [{"name": f.name, "call": f.call, "args": dict(f.args)} for f in functions],
        }
        self._program = UserCode("distflow.reward.server", {}, names, "lower `reward.processes`")
        self._processes = Processes(
            [self._program], _check_message, RewardError, "reward.time_limit_s", load_limit_s, _LARGEST
        )
        self._workers: dict[int, _Worker] = {}
        for key in range(processes):
            self._start(key)

    def close(self) -> None:
        """Kills all processes and everything they have started."""
        self._processes.close()

    @property
    def pids(self) -> list[int]:
        """Returns the processes; waits until all have loaded the functions."""
        while any(w.pid is None for w in self._workers.values()):
            self._wait()
        return [w.pid for w in self._workers.values() if w.pid is not None]

    @property
    def signatures(self) -> list[Signature]:
        """Returns the signature of each function; waits until a process has loaded them, and raises if none can."""
        while not self._signatures:
            self._wait()
        return self._signatures

    def run(self, calls: Sequence[RewardCall]) -> Generator[tuple[int, list[Result]], None, None]:
        """Yields (index of a call, results of its samples) as calls finish. Closing it early drops the rest."""
        self._calls, self._pending, self._deaths = calls, deque(range(len(calls))), Counter()
        self._done, remaining = [], len(calls)
        try:
            while remaining:
                self._assign()
                self._wait()
                done, self._done = self._done, []
                remaining -= len(done)
                yield from done
        finally:
            for key in [key for key, w in self._workers.items() if w.calls]:
                self._processes.kill(key)
                self._restart(key)

    def _assign(self) -> None:
        """Gives each process its next call, and several at once of fast ones, to save round trips."""

        calls, pending = self._calls, self._pending

        def fast(i: int) -> bool:
            return self._seconds[calls[i].function] < _FAST_S

        ready = {key: w.calls for key, w in self._workers.items() if w.pid is not None}
        for held in range(_BATCH):
            for key, queue in ready.items():
                if not pending or (held and not fast(pending[0])):
                    break
                if len(queue) == held and (not held or fast(queue[0])):
                    self._send(key, calls[pending[0]])
                    queue.append(pending.popleft())

    def _send(self, key: int, call: RewardCall) -> None:
        try:
            self._processes.send(key, vars(call), self.time_limit_s)
        except TypeError:
            name, error = next((k, e) for k, v in call.arguments.items() if (e := _encoding_error(v)))
            raise RewardError(
                f"reward '{self.functions[call.function].name}': column '{name}' cannot be passed to it: {error};"
                " store text, numbers, or lists and dicts of these in the data file"
            ) from None

    def _wait(self) -> None:
        """Waits for the next event."""
        for event in self._processes.poll():
            if isinstance(event, Message):
                self._handle(event)
            else:
                self._handle_failure(event)

    def _handle(self, message: Message) -> None:
        worker = self._workers[message.key]
        match message.body:
            case {"ready": signatures, "pid": pid} if worker.pid is None:
                self._signatures = [
                    Signature(s["kind"], tuple(s["parameters"]), tuple(s["required"]), s["var_keyword"])
                    for s in signatures
                ]
                worker.pid, self._failed_starts = pid, 0
            case {"load_error": error}:
                raise RewardError(error)
            case {"results": results, "seconds": seconds} if worker.calls:
                index = worker.calls.popleft()
                call = self._calls[index]
                self._seconds[call.function] = seconds
                if len(results) != call.samples:
                    results = [_FOREIGN_MESSAGE] * call.samples
                self._done.append((index, [NoScore(r) if isinstance(r, str) else Score(*r) for r in results]))

    def _handle_failure(self, failed: Failed) -> None:
        loading = self._workers[failed.key].pid is None
        if loading and failed.cause == "late":
            raise self._processes.late_start(self._program)
        self._failed_starts += loading
        if self._failed_starts >= _FAILED_STARTS:
            raise RewardError(
                f"{self._program.names}: {_FAILED_STARTS} processes in a row died while loading, the last one"
                f" {failed.reason}; see what they wrote to stderr"
            )
        lost, died = self._workers[failed.key].calls, failed.cause != "late"
        self._restart(failed.key)
        if not lost:
            return
        call, *queued = lost
        self._pending.extendleft(reversed(queued))
        self._deaths[call] += died
        if died and self._deaths[call] < _ATTEMPTS:
            self._pending.appendleft(call)
            return
        reason = f"ended its process in both attempts: it {failed.reason}" if died else failed.reason
        self._done.append((call, [NoScore(reason)] * self._calls[call].samples))

    def _restart(self, key: int) -> None:
        """Starts a process in the place of one that is gone."""
        self.restarts += 1
        self._start(key)

    def _start(self, key: int) -> None:
        self._workers[key] = _Worker()
        self._processes.fork(key, 0, self._setup, self.load_limit_s)


def _check_message(message: Any) -> Literal["answer"]:
    """Raises if a message did not come from our server, but from a function that wrote to its channel."""
    match message:
        case {"ready": list(), "pid": int()} | {"load_error": str()}:
            return "answer"
        case {"results": list(results), "seconds": float()} if all(map(_valid, results)):
            return "answer"
    raise BrokenChannelError(_FOREIGN_MESSAGE)


def _valid(result: Any) -> bool:
    """Returns whether an answer is a failure's reason, or a score with further numbers."""
    match result:
        case str() | [int() | float() | None, dict(), dict()]:
            return True
    return False


def _encoding_error(value: Any) -> str | None:
    try:
        json.dumps(value)
    except TypeError as e:
        return str(e)
    return None
