"""The children of a worker: a process per conversation, forked from one that has imported the environments' code."""

import math
import os
import select
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec, Event, Failed, Message
from distflow.agents.template import Template
from distflow.userproc.channel import WITHOUT_REPLY, BrokenChannelError, Channel, check_message

_EXIT_S = 5.0  # how long we wait to hear how a child ended that has closed its channel
_FAILED_STARTS = 3  # templates that may die in a row while loading
_LAST_READS = 64  # reads of what a child had sent before it ended


@dataclass
class _Child:
    key: int
    serial: int  # a key may be used again
    environment: int
    template: Template
    channel: Channel
    pipe: int  # closing it kills the child and everything it has started
    deadline: float = math.inf  # infinite while it waits for us
    held: int = 0  # requests it has made elsewhere, that are being answered
    closed: str | None = None  # why its channel is of no use, while we wait to hear how it ended

    def expect_message(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds


@dataclass
class _Templates:
    """What has to be killed at the end, apart from `Children` so that it can be finalized."""

    templates: list[Template] = field(default_factory=list)
    children: dict[int, _Child] = field(default_factory=dict)


class Children:
    """Forks a child per conversation, passes messages, and ends what hangs, dies or breaks its channel.

    A child has `time_limit_s` for each message that it owes; loading all environments may take `load_limit_s`.
    `reward_functions` (name, call, args) are those that take `environments`: a child calls them at its end. Nothing
    but `describe` waits. Not thread-safe.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        base: Path = Path(),
        time_limit_s: float = 30.0,
        load_limit_s: float = 300.0,
        reward_functions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.environments, self.time_limit_s, self.load_limit_s = list(environments), time_limit_s, load_limit_s
        self.restarts = 0  # templates that were replaced
        self._base, self._functions = base.absolute(), [dict(f) for f in reward_functions]
        self._selector = selectors.DefaultSelector()
        self._owned = _Templates()
        self._children = self._owned.children
        self._events: list[Event] = []
        self._serial = 0  # of the latest child
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._owned, self._selector)
        pythons = dict.fromkeys(e.python or sys.executable for e in environments)
        self._templates = {python: self._start_template(python) for python in pythons}
        self._descriptions: dict[int, Description] = {}

    def describe(self) -> list[Description]:
        """Returns what each environment is; waits until all are loaded, and raises if one does not load."""
        while len(self._descriptions) < len(self.environments):
            self._events += self._wait(1.0)
        return [self._descriptions[i] for i in range(len(self.environments))]

    def start(self, key: int, environment: int, start: Mapping[str, Any]) -> None:
        """Forks a child for conversation `key`; `start` is the first message to it."""
        template = self._templates[self.environments[environment].python or sys.executable]
        ours, theirs = socket.socketpair()
        pipe, end = os.pipe()
        self._serial += 1
        child = self._children[key] = _Child(key, self._serial, environment, template, Channel(ours), end)
        self._selector.register(ours, selectors.EVENT_READ, child)
        template.fork(child.serial, environment, theirs.detach(), pipe)
        if template.ready:
            child.expect_message(self._limit(child))
        child.channel.send(dict(start))
        self._select_events(child)

    def send(self, key: int, message: Mapping[str, Any]) -> None:
        """Answers a child's request; does nothing if the child is gone, which `poll` has told or will tell."""
        if (child := self._children.get(key)) is None or child.closed:
            return
        child.channel.send(dict(message))
        child.expect_message(self._limit(child))
        self._select_events(child)

    def hold(self, key: int) -> None:
        """Stops a child's clock while the endpoint works on a request of its program."""
        if child := self._children.get(key):
            child.held += 1

    def release(self, key: int) -> None:
        """Undoes one `hold`; with the last one, the child's time begins anew."""
        if child := self._children.get(key):
            child.held -= 1
            if not child.held and child.deadline < math.inf:
                child.expect_message(self._limit(child))

    def poll(self, timeout: float) -> list[Event]:
        """Returns what has happened, after at most `timeout` seconds."""
        events, self._events = self._events, []
        return events + self._wait(0.0 if events else timeout)

    def has_events(self) -> bool:
        """Whether `poll` has something to do now."""
        return bool(self._events) or self._next_deadline() <= time.monotonic() or bool(self._selector.select(0))

    def kill(self, key: int) -> None:
        """Ends a child and everything it has started, without an event."""
        if child := self._children.pop(key, None):
            _end(child, self._selector)

    def close(self) -> None:
        """Kills all children and templates."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """The template processes."""
        return [t.pid for t in self._templates.values()]

    def _limit(self, child: _Child) -> float:
        limit = self.environments[child.environment].time_limit_s
        return self.time_limit_s if limit is None else limit

    def _next_deadline(self) -> float:
        children = [c.deadline for c in self._children.values() if not c.held]
        return min([*children, *(t.deadline for t in self._templates.values())], default=math.inf)

    def _wait(self, timeout: float) -> list[Event]:
        until = self._next_deadline() - time.monotonic()
        events: list[Event] = []
        for key, _ in self._selector.select(max(0.0, min(timeout, until))):
            owner: _Child | Template = key.data
            if isinstance(owner, Template):
                events += self._read_template(owner)
            elif owner.key in self._children and self._children[owner.key] is owner:
                owner.channel.flush()
                events += self._read(owner)
                self._select_events(owner)
        now = time.monotonic()
        for template in self._templates.values():
            if template.deadline <= now:
                raise EnvironmentSetupError(
                    f"{self._names(template)} did not load within {self.load_limit_s:g} s;"
                    " check what the code waits for when it is imported"
                )
        for child in [c for c in self._children.values() if c.deadline <= now and not c.held]:
            late = f"took longer than {self._limit(child):g} s; raise `environment.time_limit_s` if it needs more time"
            events.append(self._fail(child, child.closed or late))
        return events

    def _read(self, child: _Child) -> list[Event]:
        events: list[Event] = []
        try:
            for message in child.channel.receive():
                op = check_message(message)["op"]
                if child.deadline == math.inf and op not in WITHOUT_REPLY:
                    raise BrokenChannelError("asked again before it had its answer; ask one thing at a time")
                if op == "done":
                    error = message.get("error")
                    events.append(Failed(child.key, str(error)) if error else Message(child.key, message))
                    self.kill(child.key)
                    break
                if op not in WITHOUT_REPLY:
                    child.deadline = math.inf
                events.append(Message(child.key, message))
        except BrokenChannelError as e:
            if e.ended and not child.closed:  # wait for its template to say how it ended
                child.closed = str(e)
                child.expect_message(_EXIT_S)
                self._selector.unregister(child.channel.socket)
            elif not e.ended:
                events.append(self._fail(child, str(e)))
        return events

    def _read_template(self, template: Template) -> list[Event]:
        events: list[Event] = []
        try:
            for message in template.receive():
                match message:
                    case {"ready": list(descriptions)}:
                        for environment, fields in descriptions:
                            self._descriptions[environment] = Description.of(fields)
                        for child in [c for c in self._children.values() if c.template is template]:
                            child.expect_message(self._limit(child))
                    case {"load_error": str(error)}:
                        raise EnvironmentSetupError(error)
                    case {"exited": int(serial), "how": str(how)}:
                        events += self._handle_exit(serial, how)
        except BrokenChannelError:
            events += self._replace(template)
        return events

    def _handle_exit(self, serial: int, how: str) -> list[Event]:
        child = next((c for c in self._children.values() if c.serial == serial), None)
        if child is None:
            return []
        events: list[Event] = []
        for _ in range(_LAST_READS):  # what it had sent before
            if child.closed or child.key not in self._children or not _readable(child.channel.socket):
                break
            events += self._read(child)
        if child.key in self._children:
            events.append(self._fail(child, f"ended its process: it {how}"))
        return events

    def _replace(self, template: Template) -> list[Event]:
        """Starts another template for one that has died, and with it its children."""
        how = template.ending()
        template.kill()
        self._selector.unregister(template.control)
        self._owned.templates.remove(template)
        python = next(p for p, t in self._templates.items() if t is template)
        self.restarts += 1
        if not template.ready and self.restarts >= _FAILED_STARTS:
            raise EnvironmentSetupError(
                f"{self._names(template)}: {self.restarts} processes died while loading, the last one {how};"
                " see what they wrote to stderr"
            )
        self._templates[python] = self._start_template(python)
        lost = [c for c in self._children.values() if c.template is template]
        return [self._fail(c, f"lost the process it was forked from, which {how}") for c in lost]

    def _fail(self, child: _Child, reason: str) -> Failed:
        self.kill(child.key)
        return Failed(child.key, reason)

    def _start_template(self, python: str) -> Template:
        own = [(i, e) for i, e in enumerate(self.environments) if (e.python or sys.executable) == python]
        template = Template(python, own, self._base, self._functions, time.monotonic() + self.load_limit_s)
        self._owned.templates.append(template)
        self._selector.register(template.control, selectors.EVENT_READ, template)
        return template

    def _select_events(self, child: _Child) -> None:
        """Waits for readability always, and for writability only while something is queued."""
        if child.closed or child.key not in self._children:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.channel.sending else 0)
        if self._selector.get_key(child.channel.socket).events != events:
            self._selector.modify(child.channel.socket, events, child)

    def _names(self, template: Template) -> str:
        return ", ".join(e.where for e in self.environments if (e.python or sys.executable) == template.python)


def _readable(end: socket.socket) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def _end(child: _Child, selector: selectors.BaseSelector) -> None:
    if not child.closed:
        selector.unregister(child.channel.socket)
    child.channel.close()
    os.close(child.pipe)


def _close(owner: int, owned: _Templates, selector: selectors.BaseSelector) -> None:
    if os.getpid() != owner:  # a fork of the owner is exiting
        return
    for child in owned.children.values():
        _end(child, selector)
    owned.children.clear()
    for template in owned.templates:
        template.kill()
    owned.templates.clear()
    selector.close()
