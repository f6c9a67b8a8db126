"""The processes that run users' code for a worker: each is forked, given messages, limited, killed and described here.

Rewards and environments are its two clients. A process is forked by a fork server, which may have loaded the code.
"""

import contextlib
import math
import os
import select
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distflow.errors import DistflowError
from distflow.userproc.channel import LINE_LIMIT, BrokenChannelError, Channel
from distflow.userproc.server_process import ServerProcess, UserCode

_EXIT_S = 5.0  # how long we wait to hear how a process ended that has closed its channel
_FAILED_STARTS = 3  # servers that may die in a row while loading
_LAST_READS = 64  # reads of what a process had sent before it ended


@dataclass(frozen=True)
class Message:
    """A message from the process of this key."""

    key: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A process that is gone; `reason` completes a sentence whose subject is the process, or the user's code in it.

    It was too `late`, it `exited`, or it was of no use for another reason (`broken`).
    """

    key: int
    reason: str
    cause: Literal["late", "exited", "broken"] = "broken"


Event = Message | Failed

# Checks a message, which foreign code may have written, and raises BrokenChannelError. Says whether it is what the
# process owed us ("answer"), something beside it ("note"), or the last one ("end"), after which the process is killed.
Check = Callable[[Any], Literal["answer", "note", "end"]]


@dataclass
class _Process:
    key: int
    serial: int  # a key may be used again
    server: ServerProcess
    channel: Channel
    pipe: int  # closing it kills the process and everything it has started
    limit_s: float  # for each answer that it owes
    owed: int = 1  # answers
    deadline: float = math.inf
    held: int = 0  # requests it has made elsewhere, that are being answered
    paused: bool = False
    closed: str | None = None  # why its channel is of no use, while we wait to hear how it ended

    def restart_clock(self) -> None:
        waits = self.owed and self.server.ready and not self.paused
        self.deadline = time.monotonic() + self.limit_s if waits else math.inf


@dataclass
class _Owned:
    """The processes to be killed at the end, apart from `Processes` so that it can be finalized."""

    servers: list[ServerProcess] = field(default_factory=list)
    processes: dict[int, _Process] = field(default_factory=dict)


class Processes:
    """Forks processes, passes messages, and ends what hangs, dies or breaks its channel; nothing but `poll` waits.

    Each program has a fork server of its own; loading it may take `load_limit_s`. Errors are of the class `error`, and
    `setting` is the key of the config that holds the time limit. Not thread-safe.
    """

    def __init__(
        self,
        programs: Sequence[UserCode],
        check: Check,
        error: type[DistflowError],
        setting: str,
        load_limit_s: float = 300.0,
        message_limit: int = LINE_LIMIT,
    ) -> None:
        self.load_limit_s = load_limit_s
        self.restarts = 0  # servers that were replaced
        self._check, self._error, self._setting, self._message_limit = check, error, setting, message_limit
        self._selector = selectors.DefaultSelector()
        self._owned = _Owned()
        self._processes = self._owned.processes
        self._serial = 0  # of the latest process
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._owned, self._selector)
        self._answers: dict[int, Any] = {}
        self._ended: list[tuple[int, str]] = []  # serial numbers of processes that ended while paused, and how
        self._servers = [self._start_server(p) for p in programs]

    @property
    def pids(self) -> list[int]:
        """Returns the fork servers."""
        return [s.pid for s in self._servers]

    def fork(self, key: int, program: int, message: Any, limit_s: float) -> None:
        """Forks a process and sends it a message, the first that it owes an answer to."""
        server = self._servers[program]
        ours, theirs = socket.socketpair()
        pipe, end = os.pipe()
        self._serial += 1
        channel = Channel(ours, self._message_limit)
        process = self._processes[key] = _Process(key, self._serial, server, channel, end, limit_s)
        self._selector.register(ours, selectors.EVENT_READ, process)
        server.fork(process.serial, theirs.detach(), pipe)
        process.restart_clock()
        channel.send(message)
        self._select_events(process)

    def send(self, key: int, message: Mapping[str, Any], limit_s: float | None = None) -> None:
        """Sends a message, to which the process owes an answer within its limit, or `limit_s` from now on.

        Does nothing if the process is gone, which `poll` has told or will tell.
        """
        if (process := self._processes.get(key)) is None or process.closed:
            return
        process.channel.send(dict(message))
        process.limit_s = process.limit_s if limit_s is None else limit_s
        process.owed += 1
        if process.owed == 1:
            process.restart_clock()
        self._select_events(process)

    def hold(self, key: int) -> None:
        """Stops the clock of a process while something else works for it."""
        if process := self._processes.get(key):
            process.held += 1

    def release(self, key: int) -> None:
        """Undoes one `hold`; with the last one, the time limit of the process starts again."""
        if process := self._processes.get(key):
            process.held -= 1
            if not process.held and not process.closed:
                process.restart_clock()

    def pause(self, key: int) -> None:
        """Leaves a process alone: its messages stay in its channel, and its clock stands still, until `resume`."""
        if (process := self._processes.get(key)) and not process.paused:
            if not process.closed:
                self._selector.unregister(process.channel.socket)
            process.paused, process.deadline = True, math.inf

    def resume(self, key: int) -> bool:
        """Undoes `pause`. Returns False if the process is gone, of which there is no event."""
        if (process := self._processes.get(key)) is None:
            return False
        if process.paused:
            process.paused = False
            if process.closed:
                process.deadline = time.monotonic() + _EXIT_S
            else:
                self._selector.register(process.channel.socket, selectors.EVENT_READ, process)
                self._select_events(process)
                process.restart_clock()
        return True

    def poll(self, timeout: float = math.inf) -> list[Event]:
        """Returns what has happened, after at most `timeout` seconds."""
        timeout = min(timeout, self._next_deadline() - time.monotonic())
        events: list[Event] = []
        ended, self._ended = self._ended, []
        for serial, how in ended:
            events += self._handle_exit(serial, how)
        timeout = 0.0 if events else timeout
        for key, _ in self._selector.select(None if timeout == math.inf else max(0.0, timeout)):
            owner: _Process | ServerProcess = key.data
            if isinstance(owner, ServerProcess):
                events += self._read_server(owner)
            elif self._processes.get(owner.key) is owner:
                owner.channel.flush()
                events += self._read(owner)
                self._select_events(owner)
        now = time.monotonic()
        for server in self._servers:
            if server.deadline <= now:
                raise self.late_start(server.program)
        for process in [p for p in self._processes.values() if p.deadline <= now and not p.held]:
            late = f"took longer than {process.limit_s:g} s; raise `{self._setting}` if it needs more time"
            events.append(self._fail(process, process.closed or late, "broken" if process.closed else "late"))
        return events

    def has_events(self) -> bool:
        """Returns whether `poll` has something to do now."""
        return self._next_deadline() <= time.monotonic() or bool(self._selector.select(0))

    def kill(self, key: int) -> None:
        """Ends a process and everything it has started, without an event."""
        if process := self._processes.pop(key, None):
            _end(process, self._selector)

    def close(self) -> None:
        """Kills all processes and fork servers."""
        self._finalizer()

    def late_start(self, program: UserCode) -> DistflowError:
        return self._error(
            f"{program.names} did not load within {self.load_limit_s:g} s;"
            " check what the code waits for when it is imported"
        )

    def _next_deadline(self) -> float:
        processes = [p.deadline for p in self._processes.values() if not p.held]
        return min([*processes, *(s.deadline for s in self._servers)], default=math.inf)

    def _read(self, process: _Process) -> list[Event]:
        events: list[Event] = []
        try:
            for message in process.channel.receive():
                kind = self._check(message)
                if kind == "answer":
                    if not process.owed:
                        raise BrokenChannelError("asked again before it had its answer; ask one thing at a time")
                    process.owed -= 1
                    process.restart_clock()
                events.append(Message(process.key, message))
                if kind == "end":
                    self.kill(process.key)
                    break
        except BrokenChannelError as e:
            if not e.ended:
                events.append(self._fail(process, str(e)))
            elif not process.closed:  # wait for its server to say how it ended
                process.closed = str(e)
                process.deadline = time.monotonic() + _EXIT_S
                self._selector.unregister(process.channel.socket)
        return events

    def _read_server(self, server: ServerProcess) -> list[Event]:
        events: list[Event] = []
        try:
            for message in server.receive():
                match message:
                    case {"ready": answer}:
                        self._answers[self._servers.index(server)] = answer
                        for process in [p for p in self._processes.values() if p.server is server and not p.closed]:
                            process.restart_clock()
                    case {"load_error": str(error)}:
                        raise self._error(error)
                    case {"exited": int(serial), "how": str(how)}:
                        events += self._handle_exit(serial, how)
        except BrokenChannelError:
            events += self._replace(server)
        return events

    def _handle_exit(self, serial: int, how: str) -> list[Event]:
        process = next((p for p in self._processes.values() if p.serial == serial), None)
        if process is None:
            return []
        if process.paused:
            self._ended.append((serial, how))
            return []
        events: list[Event] = []
        for _ in range(_LAST_READS):  # what it had sent before
            if process.closed or process.key not in self._processes or not _readable(process.channel.socket):
                break
            events += self._read(process)
        if process.key in self._processes:
            events.append(self._fail(process, how, "exited"))
        return events

    def _replace(self, server: ServerProcess) -> list[Event]:
        """Starts another fork server for one that has died, and with it its processes."""
        how = server.ending()
        server.kill()
        self._selector.unregister(server.control)
        self._owned.servers.remove(server)
        self.restarts += 1
        if not server.ready and self.restarts >= _FAILED_STARTS:
            raise self._error(
                f"{server.program.names}: {self.restarts} processes died while loading, the last one {how};"
                " see what they wrote to stderr"
            )
        self._servers[self._servers.index(server)] = self._start_server(server.program)
        lost = [p for p in self._processes.values() if p.server is server]
        return [self._fail(p, f"lost the process it was forked from, which {how}") for p in lost]

    def _fail(self, process: _Process, reason: str, cause: Literal["late", "exited", "broken"] = "broken") -> Failed:
        self.kill(process.key)
        return Failed(process.key, reason, cause)

    def _start_server(self, program: UserCode) -> ServerProcess:
        server = ServerProcess(program, self.load_limit_s, self._error)
        self._owned.servers.append(server)
        self._selector.register(server.control, selectors.EVENT_READ, server)
        return server

    def _select_events(self, process: _Process) -> None:
        """Waits for readability always, and for writability only while something is queued."""
        if process.closed or process.paused or self._processes.get(process.key) is not process:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.sending else 0)
        if self._selector.get_key(process.channel.socket).events != events:
            self._selector.modify(process.channel.socket, events, process)


def _readable(end: socket.socket) -> bool:
    poller = select.poll()  # `select` fails above 1,023 descriptors
    poller.register(end, select.POLLIN)
    return bool(poller.poll(0))


def _end(process: _Process, selector: selectors.BaseSelector) -> None:
    if not process.closed and not process.paused:
        selector.unregister(process.channel.socket)
    process.channel.close()
    with contextlib.suppress(OSError):  # a fork of ours may keep the pipe open: a byte in it kills, too
        os.write(process.pipe, b"\0")
    os.close(process.pipe)


def _close(owner: int, owned: _Owned, selector: selectors.BaseSelector) -> None:
    if os.getpid() != owner:  # a fork of the owner is exiting
        return
    for process in owned.processes.values():
        _end(process, selector)
    owned.processes.clear()
    for server in owned.servers:
        server.kill()
    owned.servers.clear()
    selector.close()
