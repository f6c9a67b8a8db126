"""A run beside another user of the machine who attacks all that it listens to, against the same run left alone.

    python bench/hostile.py [--connections 200] [--steps 40] [--workers 2]

The other user (nobody, if this is root) opens so many connections of each kind to every socket of every worker and to
the page of the run, holds them, and opens those anew that are closed: silent ones, parts of greetings, parts of
requests, deeply nested JSON, descriptors sent along; and sends packets of each kind by UDP. The run must end as the
other one, to the bit, without a restart, and the page must be shown to its user and to nobody else. The last line is
one JSON object.
"""

import argparse
import array
import json
import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

AGENT = """
import json
import urllib.request


def ask(base_url, api_key, row):
    body = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 12}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        text = json.loads(reply.read())["choices"][0]["message"]["content"]
    return sum(c.isdigit() for c in text or "") / 10
"""
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
CURVES = ("actor/loss", "actor/grad_norm", "reward/mean", "response_length/mean")


def prepare(folder: Path, steps: int, workers: int) -> Path:
    rows = [{"prompt": f"say {i}"} for i in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)
    config: dict[str, Any] = {
        "flow": "grpo",
        "model": {"arch": "qwen2", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2},
        "data": {"files": "data.jsonl", "batch": 8},
        "environment": {"call": "agent.py:ask"},
        "rollout": {"n": 4, "max_tokens": 80},
        "train": {"lr": 1e-3},
        "steps": steps,
        "workers": workers,
        "restarts": 0,
        "wait_limit_s": 60,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def start(config: Path, run: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distflow", "run", str(config), f"run_dir={run}"]
    with open(run.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def curve(run: Path) -> list[list[Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row["step"], *(row.get(name) for name in CURVES)] for row in rows]


def sockets(pid: int) -> dict[str, set[str]]:
    """Returns what a process listens to: ports by `tcp` and `udp`, names by `unix`. Other users read it by uid."""
    inodes = set()
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
    return found


def attack(targets: dict[str, list[str]], connections: int) -> None:
    """Attacks until it is killed; prints how many connections it has opened in all, by kind."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    "localhost".encode("idna")  # loads what nobody may not be able to read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    selector, counts, null = selectors.DefaultSelector(), dict[str, int](), os.open("/dev/null", os.O_RDONLY)

    def open_tcp(port: str, data: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", int(port)), 10)
        sock.setblocking(False)
        with suppress(OSError):
            sock.send(data)
        return sock

    def open_unix(name: str, data: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect(b"\0" + name.encode())
        with suppress(OSError):
            sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null]))])
        sock.setblocking(False)
        return sock

    def hold(open_it: Callable[[str, bytes], socket.socket], at: str, kind: str, data: bytes) -> None:
        with suppress(OSError):
            selector.register(open_it(at, data), selectors.EVENT_READ, (open_it, at, kind, data))
            counts[kind] = counts.get(kind, 0) + 1

    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(connections):
        for port in targets["tcp"]:
            for kind, data in TCP.items():
                hold(open_tcp, port, f"tcp: {kind}", data)
        for name in targets["unix"]:
            for kind, data in UNIX.items():
                hold(open_unix, name, f"unix: {kind}", data)
        for port in targets["udp"]:
            for kind, data in UDP.items():
                with suppress(OSError):
                    udp.sendto(data, ("127.0.0.1", int(port)))
                    counts[f"udp: {kind}"] = counts.get(f"udp: {kind}", 0) + 1
    print(json.dumps(counts), flush=True)
    while True:
        time.sleep(0.5)
        for key, _ in selector.select(0)[:200]:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            with suppress(BlockingIOError):
                try:
                    gone = not sock.recv(1 << 16)
                except ConnectionError:
                    gone = True
                if gone:
                    selector.unregister(sock)
                    sock.close()
                    hold(*key.data)
        for port in targets["udp"]:
            for data in UDP.values():
                with suppress(OSError):
                    udp.sendto(data, ("127.0.0.1", int(port)))


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as e:
        return e.code


def steps_of(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        attack(json.loads(args.attack), args.connections)
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    config = prepare(folder, args.steps, args.workers)
    calm, run = folder / "calm", folder / "attacked"
    assert start(config, calm).wait() == 0, calm.with_suffix(".log").read_text()

    process = start(config, run)
    while steps_of(run) < 1:
        assert process.poll() is None, run.with_suffix(".log").read_text()
        time.sleep(0.02)
    page = subprocess.Popen(
        [sys.executable, "-m", "distflow", "show", str(run), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert page.stdout is not None
    address = re.search(r"http://\S+", page.stdout.readline())
    assert address is not None
    pids = [json.loads((run / "workers" / f"{r}.heartbeat").read_text())["pid"] for r in range(args.workers)]
    targets: dict[str, set[str]] = {"tcp": set(), "udp": set(), "unix": set()}
    for pid in (*pids, page.pid):
        for kind, where in sockets(pid).items():
            targets[kind] |= where
    print(f"after step {steps_of(run)}: {targets}", flush=True)
    command = [sys.executable, __file__, "--connections", str(args.connections)]
    names = json.dumps({kind: sorted(where) for kind, where in targets.items()})
    attacker = subprocess.Popen([*command, "--attack", names], stdout=subprocess.PIPE, text=True)
    assert attacker.stdout is not None
    opened, at = json.loads(attacker.stdout.readline()), steps_of(run)
    mine, theirs = status(address.group()), status(address.group().rsplit("/", 2)[0] + "/")
    code = process.wait()
    for other in (attacker, page):
        other.kill()
    log = run.with_suffix(".log").read_text()
    print(log)
    result = {
        "exit_code": code,
        "identical": code == 0 and curve(run) == curve(calm),
        "page": mine,
        "page_without_token": theirs,
        "steps_under_attack": args.steps - at,
        "opened": opened,
    }
    print(json.dumps(result))
    sys.exit(0 if result["identical"] and (mine, theirs) == (200, 403) else 1)


if __name__ == "__main__":
    main()
