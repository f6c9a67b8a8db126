"""An EnvPool without processes: environments as generators, which answer after a number of polls of their own."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

from distflow.userproc.processes import Event, Failed, Message

Script = Callable[[Mapping[str, Any]], Generator[dict[str, Any], dict[str, Any], None]]
WITHOUT_REPLY = ("turn_reward", "done")


class FakeEnvPool:
    """`script(start)` yields messages to the worker and is sent the answers; to fail, it raises RuntimeError.

    `delay(key, message number)` says after how many polls a message comes.
    """

    def __init__(self, script: Script, delay: Callable[[int, int], int] = lambda key, number: 0) -> None:
        self.script, self.delay = script, delay
        self.running: dict[int, Generator[dict[str, Any], dict[str, Any], None]] = {}
        self.pending: list[tuple[int, Event]] = []  # (polls left, event)
        self.count: dict[int, int] = {}
        self.most = 0  # conversations at once
        self.held: list[int] = []
        self.paused: set[int] = set()
        self.forks = 0

    def start(self, key: int, environment: int, start: Mapping[str, Any]) -> None:
        self.running[key], self.count[key] = self.script(start), 0
        self.most = max(self.most, len(self.running))
        self.forks += 1
        self._advance(key, None)

    def send(self, key: int, message: Mapping[str, Any]) -> None:
        if key in self.running:
            self._advance(key, dict(message))

    def hold(self, key: int) -> None:
        self.held.append(key)

    def release(self, key: int) -> None:
        self.held.remove(key)

    def pause(self, key: int) -> None:
        self.paused.add(key)

    def resume(self, key: int) -> bool:
        self.paused.discard(key)
        return key in self.running or any(event.key == key for _, event in self.pending)

    def poll(self, timeout: float) -> list[Event]:
        self.pending = [(left - 1, event) for left, event in self.pending]
        ready = [event for left, event in self.pending if left < 0 and event.key not in self.paused]
        self.pending = [(left, event) for left, event in self.pending if left >= 0 or event.key in self.paused]
        return ready

    def has_events(self) -> bool:
        return any(event.key not in self.paused for _, event in self.pending)

    def kill(self, key: int) -> None:
        self.running.pop(key, None)
        self.pending = [(left, event) for left, event in self.pending if event.key != key]

    def _advance(self, key: int, answer: dict[str, Any] | None) -> None:
        while key in self.running:
            try:
                body = self.running[key].send(answer)  # type: ignore[arg-type]
            except RuntimeError as e:
                del self.running[key]
                self._put(Failed(key, str(e)))
                return
            self._put(Message(key, body))
            if body["op"] == "done":
                del self.running[key]
            if body["op"] not in WITHOUT_REPLY:
                return
            answer = None

    def _put(self, event: Event) -> None:
        self.count[event.key] += 1
        last = max([left for left, e in self.pending if e.key == event.key], default=0)
        self.pending.append((max(last, self.delay(event.key, self.count[event.key])), event))
