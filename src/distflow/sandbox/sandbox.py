"""Runs untrusted Python in a process without network, other files or processes, and with limited time and memory.

The isolation itself is in `distflow.sandbox.jail`. `python -m distflow.sandbox` reports what works here.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distflow.sandbox.jail import MEMORY_EXIT_CODE
from distflow.sandbox.walls import MECHANISMS, REQUIRED, explain_missing

Status = Literal["ok", "error", "timeout", "memory", "killed", "output"]

_FOLDER = str(Path(__file__).parent)
_START_S = 30.0  # for a jail to start
_GRACE_S = 5.0  # for a jail to report how a program ended, after the program's time limit
# A jail has the standard library and this folder alone, under the name that it has here.
_ENTRY = """
import sys, types
for name, path in (("distflow", []), ("distflow.sandbox", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from distflow.sandbox.jail.main import main
main()
"""


class SandboxError(Exception):
    """Programs cannot be isolated here; `missing` names the protections that do not work."""

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program; `output_kb` is for stdout and stderr each, `disk_mb` for all its files together."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 64
    output_kb: int = 1024
    open_files: int = 64
    threads: int = 64


@dataclass(frozen=True)
class ProgramResult:
    """The end of a program. `code` is the exit code, or minus the signal; `reason` explains any status but `ok`.

    `error` is an exit code other than 0. A program chooses its exit code, so `ok` does not prove that it succeeded.
    """

    status: Status
    code: int
    stdout: str
    stderr: str
    reason: str = ""


class Sandbox:
    """Runs one program at a time, each in its own process and an empty folder that is deleted afterwards.

    Raises if a protection of `REQUIRED` does not work here, unless `accept_missing` names it. Programs may import the
    standard library, and with `packages` also installed packages. Tests try it with fewer `mechanisms`.
    """

    def __init__(
        self,
        limits: ProgramLimits | None = None,
        accept_missing: Sequence[str] = (),
        packages: bool = False,
        mechanisms: Sequence[str] = MECHANISMS,
    ) -> None:
        for name in accept_missing:
            if name not in REQUIRED:
                raise SandboxError(f"accept_missing: there is no protection '{name}'; known: {', '.join(REQUIRED)}")
        self.limits, self._mechanisms = limits or ProgramLimits(), tuple(mechanisms)
        self._packages = sorted({sysconfig.get_path(p) for p in ("purelib", "platlib")}) if packages else []
        self._jail = self._start_jail()
        missing = [name for name in REQUIRED if name not in self.protections and name not in accept_missing]
        if missing:
            self.close()
            raise SandboxError(f"the sandbox for code {explain_missing(missing[0], self.refusals)}", missing)

    @property
    def protections(self) -> Mapping[str, str]:
        """Returns the protections that work here, and the mechanism of each; a program in the jail has tried them."""
        return self._jail.protections

    @property
    def refusals(self) -> Mapping[str, int]:
        """Returns, for each mechanism that was tried, the number of the error of this machine, or 0."""
        return self._jail.refusals

    def run(self, program: str, stdin: str = "", limits: ProgramLimits | None = None) -> ProgramResult:
        """Runs a Python program to its end."""
        return RunningProgram(self._working_jail(), limits or self.limits, program, stdin, (), quiet=False).wait()

    def start(self, program: str, fds: Sequence[int], limits: ProgramLimits | None = None) -> "RunningProgram":
        """Starts a Python program in the background and discards its output.

        It gets copies of the descriptors `fds` as 3, 4, …
        """
        return RunningProgram(self._working_jail(), limits or self.limits, program, "", fds, quiet=True)

    def close(self) -> None:
        """Ends the jail and any program that still runs."""
        self._jail.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _working_jail(self) -> "_Jail":
        if self._jail.broken:
            self._jail.close()
            self._jail = self._start_jail()
        return self._jail

    def _start_jail(self) -> "_Jail":
        return _Jail(self._mechanisms, self._packages)


class _Jail:
    """The process that starts and watches programs, seen from outside."""

    def __init__(self, mechanisms: Sequence[str], packages: Sequence[str]) -> None:
        if sys.platform != "linux":
            raise SandboxError("the sandbox for code needs Linux; score code on a Linux machine")
        self.broken = False
        self.channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder, self._held = _make_folder()
        try:
            # It gets no environment, no site-packages, no terminal and none of our descriptors.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _ENTRY, _FOLDER, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            self.channel.close()
            os.rmdir(self._folder)
            os.close(self._held)
            raise SandboxError(f"cannot start a sandbox: {e}; free memory, or start fewer processes") from e
        finally:
            child_end.close()
        setup = {"folder": self._folder, "mechanisms": mechanisms, "packages": packages}
        self.channel.send(json.dumps(setup).encode())
        walls = self.receive(_START_S)
        if walls is None:
            self.close()
            raise SandboxError("a sandbox did not start; see what it wrote to stderr")
        self.protections: Mapping[str, str] = walls["protections"]
        self.refusals: Mapping[str, int] = walls["refusals"]

    def receive(self, seconds: float) -> Any:
        """Returns its next message; None if it is gone or sends none in that time."""
        self.channel.settimeout(max(0.0, seconds) or 0.001)
        try:
            message = self.channel.recv(1 << 16)
        except OSError:
            message = b""
        self.broken = not message
        return json.loads(message) if message else None

    def close(self) -> None:
        self.broken = True
        self.channel.close()  # makes it end the program and clean up
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):  # in case it was killed
            os.chmod(self._folder, 0o700)
            shutil.rmtree(self._folder)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _make_folder() -> tuple[str, int]:
    """Makes the folder of a jail, and locks it: a folder without a lock is left over from a process that was killed."""
    while True:
        path = os.path.join(tempfile.gettempdir(), f"distflow-jail-{secrets.token_hex(10)}")
        try:
            os.mkdir(path, 0o700)
        except OSError as e:
            raise SandboxError(f"cannot make a folder for a sandbox: {e}; set TMPDIR to one that can be written") from e
        with contextlib.suppress(FileNotFoundError):  # another process took it for a left-over one: make another
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # where folders cannot be locked, none is removed
                fcntl.flock(held, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, held
            os.close(held)


class RunningProgram:
    """A program that was started; end it with `wait` or `stop`."""

    def __init__(
        self, jail: _Jail, limits: ProgramLimits, program: str, stdin: str, fds: Sequence[int], quiet: bool
    ) -> None:
        self._jail, self._limits = jail, limits
        self._deadline = time.monotonic() + limits.wall_s + _GRACE_S
        self._max_output = limits.output_kb << 10
        self._pipes: list[int] = []  # the read ends of stdout and stderr
        self._output: dict[int, bytearray] = {}
        sent: list[int] = []
        job = {
            **{k: getattr(limits, k) for k in ("cpu_s", "wall_s", "open_files", "threads")},
            "memory": limits.memory_mb << 20,
            "disk": limits.disk_mb << 20,
        }
        try:
            sent += [_sealed_file(program), _sealed_file(stdin)]
            for _ in range(2):
                if quiet:
                    sent.append(os.open(os.devnull, os.O_WRONLY))
                else:
                    read_end, write_end = os.pipe()
                    self._pipes.append(read_end)
                    sent.append(write_end)
            socket.send_fds(jail.channel, [json.dumps(job).encode()], [*sent, *fds])
        except BrokenPipeError:
            jail.broken = True
        finally:
            for fd in sent:
                os.close(fd)

    def stop(self) -> ProgramResult:
        """Kills the program if it still runs."""
        with contextlib.suppress(OSError):
            self._jail.channel.send(b"stop")
        return self.wait()

    def wait(self) -> ProgramResult:
        """Waits until the program ends; the jail enforces its limits."""
        try:
            report, overflow = self._collect()
        finally:
            for pipe in self._pipes:
                os.close(pipe)
        texts = [self._output.get(p, b"")[: self._max_output].decode(errors="replace") for p in self._pipes]
        stdout, stderr = texts or ("", "")
        if report is None:
            return ProgramResult("killed", -signal.SIGKILL, stdout, stderr, "its sandbox died, or did not answer")
        if report["end"] == "not isolated":
            raise SandboxError(
                f"the sandbox for code failed to isolate a program: {report['error']};"
                " `python -m distflow.sandbox` reports what works on this machine"
            )
        status, reason = _status(report, self._limits, overflow)
        return ProgramResult(status, report["code"], stdout, stderr, reason)

    def _collect(self) -> tuple[Any, bool]:
        """Collects output until the program ends; returns the jail's report and whether the output was too long."""
        report, overflow = None, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._jail.channel, selectors.EVENT_READ)
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_READ)
                self._output[pipe] = bytearray()
            while selector.get_map():
                left = self._deadline - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, left))] if not self._jail.broken else []
                if not ready:
                    self._jail.broken = True
                    return None, overflow
                for source in ready:
                    if isinstance(source, int):
                        data = os.read(source, 1 << 16)
                        self._output[source] += data
                        if not data:
                            selector.unregister(source)
                        elif len(self._output[source]) > self._max_output and not overflow:
                            overflow = True
                            with contextlib.suppress(OSError):
                                self._jail.channel.send(b"stop")
                        del self._output[source][self._max_output + 1 :]
                    else:
                        report = self._jail.receive(1.0)
                        selector.unregister(source)
        return report, overflow


def _status(report: Mapping[str, Any], limits: ProgramLimits, overflow: bool) -> tuple[Status, str]:
    end, code = report["end"], report["code"]
    if overflow:
        return "output", f"it wrote more than {limits.output_kb} KB"
    if end == "timeout":
        return "timeout", f"it took longer than {limits.wall_s:g} s"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and end == "exited" and report["cpu_s"] >= limits.cpu_s):
        return "timeout", f"it used more than {limits.cpu_s:g} s of CPU time"
    if end == "threads":
        return "killed", f"it had more than {limits.threads} threads"
    if end == "disk":
        return "killed", f"it wrote more than {limits.disk_mb} MB, or too many files"
    if end == "stopped":
        return "killed", "it was stopped"
    if code == MEMORY_EXIT_CODE:
        return "memory", f"it needed more than {limits.memory_mb} MB"
    if code < 0:
        return "killed", f"it was killed by {signal.Signals(-code).name}"
    return ("error", f"it exited with {code}") if code else ("ok", "")


def _sealed_file(text: str) -> int:
    """Returns the descriptor of a read-only file in memory."""
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd
