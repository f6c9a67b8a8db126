"""Connections and packets of somebody who is not part of a run, to all that it listens to."""

import array
import os
import selectors
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NESTED = b"[" * 60_000
TCP: dict[str, bytes] = {
    "silent": b"",
    "part of a greeting": b"x" * 10,
    "wrong greeting": b"x" * 48,
    "part of a request": b"POST /v1/chat/completions HTTP/1.1\r\nX: ",
    "request without a key": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "nested JSON": NESTED,
}
UNIX = {"descriptor with a part of a greeting": b"x", "descriptor with a wrong greeting": b"x" * 48}
UDP = {"nested JSON": NESTED, "bytes": b"\xff" * 100, "alarm": b'["","alarm",{"raiser":0,"address":"","reason":""}]'}


def listening_sockets(pids: Sequence[int]) -> dict[str, list[str]]:
    """Returns what processes listen to: ports by `tcp` and `udp`, names by `unix`."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found: dict[str, set[str]] = {"tcp": set(), "udp": set(), "unix": set()}
    for kind, listens in (("tcp", "0A"), ("udp", "07")):
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == listens and fields[9] in inodes:
                found[kind].add(str(int(fields[1].partition(":")[2], 16)))
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("@distflow-") and fields[3] == "00010000":
            found["unix"].add(fields[7][1:])
    return {kind: sorted(names) for kind, names in found.items()}


class Strangers:
    """Opens connections of each kind to each socket and holds them; sends packets of each kind."""

    def __init__(self, targets: Mapping[str, Sequence[str]]) -> None:
        self.targets = targets
        self.counts: Counter[str] = Counter()  # connections and packets, by kind
        self._selector = selectors.DefaultSelector()
        self._null = os.open("/dev/null", os.O_RDONLY)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def connect(self) -> None:
        """Opens one connection of each kind to each socket, and sends one packet of each kind."""
        for protocol, kinds in (("tcp", TCP), ("unix", UNIX)):
            for where in self.targets[protocol]:
                for kind in kinds:
                    self._open(protocol, where, kind)
        self._send()

    def connect_again(self) -> None:
        """Opens anew what was closed."""
        for key, _ in self._selector.select(0)[:200]:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            with suppress(BlockingIOError):
                try:
                    gone = not sock.recv(1 << 16)
                except ConnectionError:
                    gone = True
                if gone:
                    self._selector.unregister(sock)
                    sock.close()
                    self._open(*key.data)
        self._send()

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._udp.close()
        os.close(self._null)

    def _open(self, protocol: str, where: str, kind: str) -> None:
        with suppress(OSError):
            sock = self._connect_tcp(where) if protocol == "tcp" else self._connect_unix(where)
            with suppress(OSError):
                if protocol == "tcp":
                    sock.send(TCP[kind])
                else:
                    sock.sendmsg([UNIX[kind]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._null]))])
            self._selector.register(sock, selectors.EVENT_READ, (protocol, where, kind))
            self.counts[f"{protocol}: {kind}"] += 1

    def _connect_tcp(self, port: str) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", int(port)), 10)
        sock.setblocking(False)
        return sock

    def _connect_unix(self, name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect(b"\0" + name.encode())
        sock.setblocking(False)
        return sock

    def _send(self) -> None:
        for port in self.targets["udp"]:
            for kind, data in UDP.items():
                with suppress(OSError):
                    self._udp.sendto(data, ("127.0.0.1", int(port)))
                    self.counts[f"udp: {kind}"] += 1
