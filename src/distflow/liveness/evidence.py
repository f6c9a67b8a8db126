"""Asks the system about other workers: whether a process of this host runs, and what TCP to another one does.

Read when a run is stuck; on other systems than Linux there is nothing to read.
"""

import os
import re
import socket
import sys
from pathlib import Path

from distflow.util.parent import process_exists, process_status

RETRIES = 3  # after which bytes without an acknowledgement are taken for lost: about two seconds
_UNFINISHED = ("01", "02", "04")  # ESTABLISHED, SYN_SENT, FIN_WAIT1, as in include/net/tcp_states.h


def process_state(pid: int) -> str:
    """Returns `is stopped` or `is gone` for a process of this host, "" if it is well or cannot be seen."""
    if not process_exists(pid):
        return "is gone"
    return "is stopped" if process_status(pid)[0] in ("T", "t") else ""


def unacknowledged() -> dict[str, int]:
    """Returns the bytes that this process has sent by TCP again and again without an answer, by address."""
    own, lost = _sockets(), dict[str, int]()
    for file in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            retries = int(fields[6], 16)
            if fields[3] in _UNFINISHED and retries >= RETRIES and fields[9] in own:
                address, size = _address(fields[2]), int(fields[4].partition(":")[0], 16)
                lost[address] = lost.get(address, 0) + size
    return lost


def _sockets() -> set[str]:
    """Returns the inodes of the sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    return {m[1] for link in links if (m := re.fullmatch(r"socket:\[(\d+)\]", link))}


def _address(text: str) -> str:
    """Returns the address of `0100007F:A909`, as the kernel writes it: words in its own order of bytes."""
    words = re.findall("." * 8, text.partition(":")[0])
    data = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if len(data) == 16 and data.startswith(bytes(10) + b"\xff\xff"):
        data = data[12:]
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def describe_network(own: str, host: str, size: int, heard: bool) -> str:
    """Returns a sentence about TCP to another host that is broken; `heard`: its heartbeats arrive."""
    start = f"TCP from {own} to {host} is broken: {size} bytes sent were never acknowledged"
    if heard:
        return f"{start}, though heartbeats (UDP) from {host} arrive: packets from {own} to {host} are lost"
    return f"{start}, and no heartbeat (UDP) from {host} arrives"
