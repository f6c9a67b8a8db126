"""The processes of a worker's conversations, each forked from one that has imported the environments' code."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.userproc.channel import BrokenChannelError
from distflow.userproc.processes import Event, Failed, Processes
from distflow.userproc.server_process import UserCode

# What a process may ask for, each with the fields that it must have; no answer follows to those in WITHOUT_REPLY.
OPERATIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "begin": {"messages": list},
    "turn": {"messages": list},
    "generate": {"token_ids": list},
    "encode": {"text": str},
    "decode": {"token_ids": list},
    "apply_chat_template": {"messages": list},
    "turn_reward": {"reward": (int, float)},
    "done": {"rewards": dict, "metrics": dict, "extra": dict},
}
WITHOUT_REPLY: dict[str, Literal["note", "end"]] = {"turn_reward": "note", "done": "end"}


class EnvPool(Processes):
    """Forks a process per conversation. It has the time limit of its environment for each message that it owes.

    `reward_functions` (name, call, args) take `environments`: each process calls them at its end.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        base: Path = Path(),
        time_limit_s: float = 30.0,
        load_limit_s: float = 300.0,
        reward_functions: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.environments, self.time_limit_s = list(environments), time_limit_s
        self._events: list[Event] = []  # that came while `describe` waited
        of_python: dict[str, list[int]] = {}
        for i, e in enumerate(environments):
            of_python.setdefault(e.python or sys.executable, []).append(i)
        self._program = {i: program for program, group in enumerate(of_python.values()) for i in group}
        programs = []
        for python, group in of_python.items():
            arguments = {
                "base": str(base.absolute()),
                "environments": [[i, asdict(self.environments[i])] for i in group],
                "reward_functions": [dict(f) for f in reward_functions],
            }
            names = ", ".join(self.environments[i].where for i in group)
            programs.append(UserCode("distflow.agents.process", arguments, names, "check `environment.python`", python))
        super().__init__(
            programs, check_message, EnvironmentSetupError, "environment.time_limit_s", load_limit_s=load_limit_s
        )

    def describe(self) -> list[Description]:
        """Returns what each environment is; waits until all are loaded, and raises if one does not load."""
        while len(self._answers) < len(self._servers):
            self._events += super().poll(1.0)
        fields = {i: f for answer in self._answers.values() for i, f in answer}
        return [Description.of(fields[i]) for i in range(len(self.environments))]

    def start(self, key: int, environment: int, start: Mapping[str, Any]) -> None:
        """Forks a process for conversation `key`; `start` is the first message to it."""
        limit = self.environments[environment].time_limit_s
        message = {**start, "index": environment}
        self.fork(key, self._program[environment], message, self.time_limit_s if limit is None else limit)

    def poll(self, timeout: float) -> list[Event]:  # type: ignore[override]
        """Returns the events so far, after at most `timeout` seconds; a failure's subject is the environment."""
        events, self._events = self._events, []
        events += super().poll(0.0 if events else timeout)
        return [_as_failure(event) for event in events]

    def has_events(self) -> bool:
        return bool(self._events) or super().has_events()


def _as_failure(event: Event) -> Event:
    if isinstance(event, Failed):
        return replace(event, reason=f"ended its process: it {event.reason}") if event.cause == "exited" else event
    error = event.body.get("error") if event.body["op"] == "done" else None
    return Failed(event.key, str(error)) if error else event


def check_message(message: Any) -> Literal["answer", "note", "end"]:
    """Raises if a message is no operation with its fields; it may come from foreign code."""
    op = str(message.get("op")) if isinstance(message, dict) else ""
    fields = OPERATIONS.get(op)
    if fields is None or not all(isinstance(message.get(name), kind) for name, kind in fields.items()):
        raise BrokenChannelError("wrote to the channel of its process; write only to files that it has opened itself")
    return WITHOUT_REPLY.get(op, "answer")
