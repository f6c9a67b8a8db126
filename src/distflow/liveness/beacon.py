"""The one UDP socket of each worker: heartbeats to the peer that watches it, and alarms that reach all.

Heartbeats cost a worker one packet per tick, whatever the number of workers. An alarm goes to the ranks at distances
1, 2, 4 … in both directions, and each passes it on: it reaches all in log N hops, around workers that are gone.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from distflow.liveness.heartbeat import Record, pack, unpack

MAX_BYTES = 1400  # of an answer, which then fits in one frame of most networks


@dataclass(frozen=True)
class Alarm:
    """Raised by one worker; all others tell that one what they are doing."""

    raiser: int
    address: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """A worker's answer to an alarm: its record, the stack of its code, and a peer without a heartbeat, if any."""

    record: Record
    stack: str = ""
    silent: Record | None = None


class Beacon:
    def __init__(self, rank: int, workers: int, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.rank, self.workers = rank, workers
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)  # all may answer an alarm at once
        self._socket.bind((host, 0))
        self.address = json.dumps(self._socket.getsockname()[:2])
        self._token = ""
        self._watcher = self.address
        self._relays: list[str] = []

    def connect(self, token: str, lookup: Callable[[int], str]) -> None:
        """`token`: a secret of this run, without which a packet is ignored; `lookup`: rank → address."""
        self._token = token
        self._watcher = lookup((self.rank - 1) % self.workers)
        self._relays = [lookup(r) for r in relay_ranks(self.rank, self.workers)]

    def send_beat(self, record: Record) -> None:
        self._send(self._watcher, "beat", pack(record))

    def spread(self, alarm: Alarm) -> None:
        for address in self._relays:
            self._send(address, "alarm", asdict(alarm))

    def answer(self, alarm: Alarm, answer: Answer) -> None:
        body = {"record": pack(answer.record), "silent": answer.silent and pack(answer.silent), "stack": ""}
        room = MAX_BYTES - len(json.dumps(body)) - 2 * answer.stack.count("\n") - 100
        self._send(alarm.address, "answer", body | {"stack": answer.stack[-room:] if room > 0 else ""})

    def wake(self) -> None:
        """Makes `receive` return, in the thread that is in it."""
        self._send(self.address, "wake", None)

    def receive(self, timeout_s: float) -> Record | Alarm | Answer | None:
        """Returns a heartbeat, an alarm or an answer of a peer; None after the timeout, or for another packet."""
        self._socket.settimeout(max(0.001, timeout_s))
        try:
            data, _ = self._socket.recvfrom(1 << 16)
        except TimeoutError:
            return None
        except OSError:  # the answer of a host where nobody listens any more
            time.sleep(0.001)
            return None
        return self._parse(data)

    def close(self) -> None:
        self._socket.close()

    def _parse(self, data: bytes) -> Record | Alarm | Answer | None:
        """Returns a packet's content, None if it is not of this run: anybody may send to a UDP socket."""
        try:
            token, kind, body = json.loads(data)
            if token != self._token:
                return None
            match kind:
                case "beat":
                    return unpack(body)
                case "alarm":
                    return Alarm(int(body["raiser"]), str(body["address"]), str(body["reason"]))
                case "answer":
                    silent = unpack(body["silent"]) if body["silent"] else None
                    return Answer(unpack(body["record"]), str(body["stack"]), silent)
        except (ValueError, TypeError, KeyError):
            pass
        return None

    def _send(self, address: str, kind: str, body: Any) -> None:
        data = json.dumps([self._token, kind, body], separators=(",", ":")).encode()
        with contextlib.suppress(OSError, ValueError):  # no route to a host that is gone
            host, port = json.loads(address)
            self._socket.sendto(data, (host, port))


def relay_ranks(rank: int, workers: int) -> list[int]:
    """Returns the ranks at distances 1, 2, 4 … in both directions."""
    distances = [1 << k for k in range(max(0, workers - 1).bit_length()) if 1 << k < workers]
    ranks = [(rank + sign * d) % workers for d in distances for sign in (1, -1)]
    return [r for r in dict.fromkeys(ranks) if r != rank]
