"""Runs Python that nobody has read: a process without network, files, company, secrets or endless time.

`python -m distflow.reward.sandbox` says what holds on this machine. How it is done is in `distflow.reward.cell`.
"""

import contextlib
import fcntl
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distflow.errors import suggest
from distflow.reward.errors import RewardError

Status = Literal["ok", "error", "timeout", "memory", "killed", "output"]

WALLS = ("namespaces", "landlock", "seccomp")
# What a sandbox must be able to do, and what code could do where it cannot.
NEEDED = {
    "network": "keep code off the network; that takes seccomp, or user namespaces",
    "files": "keep code from other files; that takes Landlock (Linux ≥ 5.13)",
    "processes": "keep code from starting and signalling processes; that takes seccomp, on x86_64 or aarch64",
}
_START_S = 30.0  # for a cell to come up
_GRACE_S = 5.0  # for a cell to tell how a program ended, after its time
_MEMORY_CODE = 77
# The package without its own imports: the cell has the standard library alone.
_ENTRY = """
import sys, types
package = types.ModuleType("distflow")
package.__path__ = [sys.argv[1]]
sys.modules["distflow"] = package
from distflow.reward.cell.main import main
main()
"""


@dataclass(frozen=True)
class Limits:
    """Of one program. Beyond `output_kb`, on stdout or stderr, it is killed; `disk_mb` is for all its files."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    output_kb: int = 1024
    open_files: int = 64
    threads: int = 64


@dataclass(frozen=True)
class Result:
    """How a program ended. `code` is negative after a signal; `why` says in words what is not `ok`.

    `error` is any other exit code than 0; a program chooses its code, so `ok` says only that it wanted to look so.
    """

    status: Status
    code: int
    stdout: str
    stderr: str
    why: str = ""


class Sandbox:
    """One program at a time, each in a process and a folder of its own, of which nothing is kept.

    Refuses to work where something of `NEEDED` does not hold, unless `accept_missing` names it. Programs may import
    the standard library; with `packages` also what is installed here. `walls` are those to try, for tests.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        accept_missing: Sequence[str] = (),
        packages: bool = False,
        walls: Sequence[str] = WALLS,
    ) -> None:
        for name in accept_missing:
            if name not in NEEDED:
                raise RewardError(f"accept_missing: there is no '{name}'{suggest(name, NEEDED)}")
        self.limits, self._walls = limits or Limits(), tuple(walls)
        self._packages = sorted({sysconfig.get_path(p) for p in ("purelib", "platlib")}) if packages else []
        self._cell = self._start()
        missing = [name for name in NEEDED if name not in self.protections and name not in accept_missing]
        if missing:
            self.close()
            raise RewardError(
                f"the sandbox for code cannot {NEEDED[missing[0]]}; use a machine or a container that has it,"
                f" or accept the risk with `args: {{accept_missing: [{', '.join(missing)}]}}` of the reward function"
            )

    @property
    def protections(self) -> Mapping[str, str]:
        """What holds on this machine, and by what; a program has tried it."""
        return self._cell.protections

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run Python to its end."""
        return Run(self._ready(), limits or self.limits, program, stdin, (), quiet=False).wait()

    def start(self, program: str, fds: Sequence[int], limits: Limits | None = None) -> "Run":
        """Run Python in the background, and `wait` for it or `stop` it later. What it prints is dropped.

        It is given `fds` as 3, 4, …; they stay open here.
        """
        return Run(self._ready(), limits or self.limits, program, "", fds, quiet=True)

    def close(self) -> None:
        """End whatever runs."""
        self._cell.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> "_Cell":
        if self._cell.broken:
            self._cell.close()
            self._cell = self._start()
        return self._cell

    def _start(self) -> "_Cell":
        return _Cell(self._walls, self._packages)


class _Cell:
    """The process that starts and watches programs."""

    def __init__(self, walls: Sequence[str], packages: Sequence[str]) -> None:
        if sys.platform != "linux":
            raise RewardError("the sandbox for code needs Linux; score code on another machine")
        self.broken = False
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = os.path.join(tempfile.gettempdir(), f"distflow-cell-{secrets.token_hex(8)}")
        root = Path(__file__).parents[1]
        try:
            # No environment, no site-packages, no terminal, none of our files.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _ENTRY, str(root), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            self.line.close()
            raise RewardError(f"cannot start a sandbox: {e}; lower reward.processes, or free memory") from e
        finally:
            theirs.close()
        self.line.send(json.dumps({"folder": self._folder, "walls": walls, "packages": packages}).encode())
        told = self.hear(_START_S)
        if told is None:
            self.close()
            raise RewardError("a sandbox did not start; see what it wrote to stderr")
        self.protections: Mapping[str, str] = told

    def hear(self, seconds: float) -> Any:
        """Its next message; None if it is gone or says nothing for so long."""
        self.line.settimeout(max(0.0, seconds) or 0.001)
        try:
            message = self.line.recv(1 << 16)
        except OSError:
            message = b""
        self.broken = not message
        return json.loads(message) if message else None

    def close(self) -> None:
        self.broken = True
        self.line.close()  # it ends the program, and cleans up
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)


class Run:
    """A program that was started."""

    def __init__(self, cell: _Cell, limits: Limits, program: str, stdin: str, fds: Sequence[int], quiet: bool) -> None:
        self._cell, self._limits = cell, limits
        self._deadline = time.monotonic() + limits.wall_s + _GRACE_S
        self._most = limits.output_kb << 10
        self._pipes: list[int] = []
        self._text: dict[int, bytearray] = {}
        given, job = [], {
            **{k: getattr(limits, k) for k in ("cpu_s", "wall_s", "open_files", "threads")},
            "memory": limits.memory_mb << 20,
            "disk": limits.disk_mb << 20,
        }  # fmt: skip
        try:
            given += [_sealed(program), _sealed(stdin)]
            for _ in range(2):
                if quiet:
                    given.append(os.open(os.devnull, os.O_WRONLY))
                else:
                    ours, theirs = os.pipe()
                    self._pipes.append(ours)
                    given.append(theirs)
            socket.send_fds(cell.line, [json.dumps(job).encode()], [*given, *fds])
        except BrokenPipeError:
            cell.broken = True
        finally:
            for fd in given:
                os.close(fd)

    def stop(self) -> Result:
        """End it, if it has not ended."""
        with contextlib.suppress(OSError):
            self._cell.line.send(b"stop")
        return self.wait()

    def wait(self) -> Result:
        try:
            told, too_much = self._listen()
        finally:
            for pipe in self._pipes:
                os.close(pipe)
        out, err = [self._text.get(pipe, b"")[: self._most].decode(errors="replace") for pipe in self._pipes] or [
            "",
            "",
        ]
        if told is None:
            return Result("killed", -signal.SIGKILL, out, err, "its sandbox died, or did not answer")
        if told["how"] == "broken":
            raise RewardError(f"the sandbox for code could not be closed: {told['trouble']}")
        status, why = _verdict(told, self._limits, too_much)
        return Result(status, told["code"], out, err, why)

    def _listen(self) -> tuple[Any, bool]:
        """What the cell says of the end, and whether the program said too much."""
        told, too_much = None, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._cell.line, selectors.EVENT_READ)
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_READ)
                self._text[pipe] = bytearray()
            while selector.get_map():
                left = self._deadline - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, left))] if not self._cell.broken else []
                if not ready:
                    self._cell.broken = True
                    return None, too_much
                for source in ready:
                    if isinstance(source, int):
                        data = os.read(source, 1 << 16)
                        self._text[source] += data
                        if not data:
                            selector.unregister(source)
                        elif len(self._text[source]) > self._most and not too_much:
                            too_much = True
                            with contextlib.suppress(OSError):
                                self._cell.line.send(b"stop")
                        del self._text[source][self._most + 1 :]
                    else:
                        told = self._cell.hear(1.0)
                        selector.unregister(source)
        return told, too_much


def _verdict(told: Mapping[str, Any], limits: Limits, too_much: bool) -> tuple[Status, str]:
    how, code = told["how"], told["code"]
    if too_much:
        return "output", f"it wrote more than {limits.output_kb} KB"
    if how == "timeout":
        return "timeout", f"it took longer than {limits.wall_s:g} s"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and how == "ended" and told["cpu_s"] >= limits.cpu_s):
        return "timeout", f"it used more than {limits.cpu_s:g} s of CPU time"
    if how == "threads":
        return "killed", f"it had more than {limits.threads} threads"
    if how == "disk":
        return "killed", f"it wrote more than {limits.disk_mb} MB, or too many files"
    if how == "stopped":
        return "killed", "it was stopped"
    if code == _MEMORY_CODE:
        return "memory", f"it needed more than {limits.memory_mb} MB"
    if code < 0:
        return "killed", f"it was killed by {signal.Signals(-code).name}"
    return ("error", f"it exited with {code}") if code else ("ok", "")


def _sealed(text: str) -> int:
    """A file in memory that can only be read."""
    fd = os.memfd_create("given", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def report() -> Iterator[str]:
    """What holds here, line by line."""
    with Sandbox(accept_missing=list(NEEDED)) as sandbox:
        for name, need in NEEDED.items():
            yield f"{name:10} {sandbox.protections.get(name) or f'NO: cannot {need}'}"
        yield f"{'disk':10} {sandbox.protections['disk']}"
        began = time.perf_counter()
        for _ in range(20):
            sandbox.run("")
        yield f"{'a run':10} {(time.perf_counter() - began) * 50:.1f} ms"


if __name__ == "__main__":
    print(*report(), sep="\n")
