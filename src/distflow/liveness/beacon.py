"""The sockets of each worker's watchdog: heartbeats to the peer that watches it, and alarms that reach all.

Heartbeats are UDP packets and cost a worker two per tick, whatever the number of workers. An alarm goes to the ranks at
distances 1, 2, 4 … in both directions, and each passes it on: it reaches all in log N hops, around workers that are
gone. Messages that UDP may have lost go by TCP as well. Every packet bears a code that only this run can
make, and nothing is parsed before that is checked.
"""

import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from distflow.liveness.heartbeat import Record, pack, unpack
from distflow.liveness.tcp_messages import Reach, TcpMessages

MAX_BYTES = 1400  # of an answer, which then fits in one frame of most networks
CODE = hashlib.sha256().digest_size  # bytes before the content of a packet


@dataclass(frozen=True)
class Alarm:
    """Raised by one worker; all others tell that one what they are doing.

    `accused`: the rank without a heartbeat that is the reason, −1: it is another one; `deaf`: the raiser hears no other
    host, so that the fault may be its own; `informed`: the raiser hears one of whom another alarm says that it does not
    hear. Of several alarms, the one with the least `priority` counts.
    """

    raiser: int
    address: str
    reason: str
    host: str = ""
    accused: int = -1
    deaf: bool = False
    informed: bool = False

    @property
    def priority(self) -> tuple[bool, bool, int]:
        return self.deaf, not self.informed, self.raiser


@dataclass(frozen=True)
class Answer:
    """A worker's answer to an alarm: its record, the stack of its code, and what it knows of others.

    `silent`: the peer it watches, if that has no heartbeat; `unheard`: peers it should hear of and does not; `states`:
    processes of its host that are not well, by rank; `notes`: what is wrong with its connections.
    """

    record: Record
    stack: str = ""
    silent: Record | None = None
    unheard: tuple[int, ...] = ()
    states: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """Asked by a worker that misses a heartbeat; the answer to `address` is one."""

    rank: int
    address: str


@dataclass(frozen=True)
class Beat:
    record: Record
    by_tcp: bool


class Beacon:
    def __init__(self, rank: int, workers: int, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.rank, self.workers = rank, workers
        self._selector = selectors.DefaultSelector()
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)  # all may answer an alarm at once
        self._socket.bind((host, 0))
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._tcp = TcpMessages(host, self._selector)
        self.address = json.dumps([json.dumps(self._socket.getsockname()[:2]), self._tcp.address])  # of UDP, of TCP
        self._token = b""
        self._addresses: dict[int, str] = {}  # of the ranks that this one talks to
        self._turn = 0
        self._received: deque[tuple[bytes, bool]] = deque()  # packets, and whether they came by TCP

    def connect(self, token: str, lookup: Callable[[int], str]) -> None:
        """`token`: a secret of this run, without which a packet is ignored; `lookup`: rank → address."""
        self._token = token.encode()
        self._addresses = {r: lookup(r) for r in relay_ranks(self.rank, self.workers)}

    @property
    def known(self) -> tuple[int, ...]:
        """Returns the ranks that this one exchanges beats with."""
        return tuple(self._addresses)

    def send_beat(self, record: Record) -> None:
        """Sends a heartbeat to the peer that watches this one, and to one of the others in turn."""
        relays = [r for r in self._addresses if r != (self.rank - 1) % self.workers]
        to = [(self.rank - 1) % self.workers, *([relays[self._turn % len(relays)]] if relays else [])]
        self._turn += 1
        for rank in to:
            self._send(self._addresses.get(rank, self.address), "beat", pack(record))

    def ask(self, rank: int) -> None:
        """Asks a peer for a heartbeat, by TCP."""
        if rank in self._addresses:
            self._send(self._addresses[rank], "ask", [self.rank, self.address], udp=False, tcp=True)

    def reply(self, question: Question, record: Record) -> None:
        self._send(question.address, "beat", pack(record), tcp=True)

    def reach(self, rank: int) -> Reach | None:
        """Returns what the last message by TCP to a rank has met; None if there was none."""
        with contextlib.suppress(KeyError):
            return self._tcp.reach.get(json.loads(self._addresses[rank])[1])
        return None

    def spread(self, alarm: Alarm, tcp: bool = False) -> None:
        """Sends an alarm on; `tcp`: by TCP as well."""
        for address in self._addresses.values():
            self._send(address, "alarm", asdict(alarm), tcp=tcp)

    def answer(self, alarm: Alarm, answer: Answer, tcp: bool = False) -> None:
        body = asdict(answer) | {"record": pack(answer.record), "silent": answer.silent and pack(answer.silent)}
        room = MAX_BYTES - len(json.dumps(body | {"stack": ""})) - 2 * answer.stack.count("\n") - 100
        self._send(alarm.address, "answer", body | {"stack": answer.stack[-room:] if room > 0 else ""}, tcp=tcp)

    def wake(self) -> None:
        """Makes `receive` return, in the thread that is in it."""
        self._send(self.address, "wake", None)

    def receive(self, timeout_s: float) -> Beat | Alarm | Answer | Question | None:
        """Returns a packet of a peer; None after the timeout, or for another packet."""
        if not self._received:
            self._tcp.tick()
            for key, _ in self._selector.select(max(0.001, timeout_s)):
                assert isinstance(key.fileobj, socket.socket)
                if self._tcp.owns(key.fileobj):
                    self._received += [(data, True) for data in self._tcp.progress(key.fileobj)]
                    continue
                try:
                    self._received.append((self._socket.recv(1 << 16), False))
                except BlockingIOError:
                    pass
                except OSError:  # the answer of a host where no process listens any more
                    time.sleep(0.001)
        return self._parse(*self._received.popleft()) if self._received else None

    def close(self) -> None:
        self._selector.close()
        self._tcp.close()
        self._socket.close()

    def _parse(self, packet: bytes, by_tcp: bool = False) -> Beat | Alarm | Answer | Question | None:
        """Returns a packet's content, None if it is not of this run: anybody may send to these sockets."""
        code, data = packet[:CODE], packet[CODE:]
        if not self._token or not hmac.compare_digest(code, self._code(data)):
            return None
        try:
            kind, body = json.loads(data)
            match kind:
                case "beat":
                    return Beat(unpack(body), by_tcp)
                case "ask":
                    return Question(int(body[0]), str(body[1]))
                case "alarm":
                    return Alarm(**body)
                case "answer":
                    silent = unpack(body["silent"]) if body["silent"] else None
                    states = tuple((int(rank), str(state)) for rank, state in body["states"])
                    lists = {"unheard": tuple(body["unheard"]), "states": states, "notes": tuple(body["notes"])}
                    return Answer(unpack(body["record"]), str(body["stack"]), silent, **lists)
        except (ValueError, TypeError, KeyError, RecursionError):  # of another version of the code
            pass
        return None

    def _code(self, data: bytes) -> bytes:
        return hmac.digest(self._token, data, "sha256")

    def _send(self, address: str, kind: str, body: Any, udp: bool = True, tcp: bool = False) -> None:
        data = json.dumps([kind, body], separators=(",", ":")).encode()
        packet = self._code(data) + data
        with contextlib.suppress(OSError, ValueError):  # no route to a host that is gone
            by_udp, by_tcp = json.loads(address)
            if tcp:
                self._tcp.send(by_tcp, packet)
            if udp:
                host, port = json.loads(by_udp)
                self._socket.sendto(packet, (host, port))


def relay_ranks(rank: int, workers: int) -> list[int]:
    """Returns the ranks at distances 1, 2, 4 … in both directions."""
    distances = [1 << k for k in range(max(0, workers - 1).bit_length()) if 1 << k < workers]
    ranks = [(rank + sign * d) % workers for d in distances for sign in (1, -1)]
    return [r for r in dict.fromkeys(ranks) if r != rank]
