"""The jail's main loop: forks this small interpreter for each program, isolates the fork, and watches it.

The other end is `distflow.reward.sandbox.sandbox`. The jail itself never reads a program or its input, so a fork
cannot find those of others in its memory.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.reward.sandbox.jail import MEMORY_EXIT_CODE, landlock, seccomp, system

_POLL_S = 0.05  # how often limits that the kernel does not enforce are checked
_MAX_INODES = 4096  # files and folders a program may create
# Imported once, before any fork: what programs import most, and what runs their tests.
_COMMON = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")
_PRELOADED = (*_COMMON, "distflow.reward.sandbox.remote_tests")
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")


class Jail:
    """Runs programs in `folder`; they may import the standard library and what is in the folders `packages`.

    Of `mechanisms` it uses those that this machine has.
    """

    def __init__(self, folder: str, mechanisms: Sequence[str], packages: Sequence[str]) -> None:
        self.folder = folder
        self.namespaces = "namespaces" in mechanisms and system.new_namespaces()
        self.landlock = landlock.version() if "landlock" in mechanisms else 0
        self.seccomp = "seccomp" in mechanisms and seccomp.available()
        self.pid = os.getpid()
        self.readable = (os.path.dirname(os.__file__), *packages, *_LIBRARIES, *_TIME_ZONES, *_DEVICES)
        system.adopt_orphans()
        self.tmpfs = self.namespaces and self._can_mount()

    def protections(self) -> dict[str, str]:
        """Returns the protections that work and the mechanism behind each; an isolated fork tries to break them."""
        read_end, write_end = os.pipe()
        self._prepare_folder(1 << 20)
        pid = os.fork()
        if not pid:
            with _ForkGuard(write_end):
                self._isolate({"cpu_s": 5, "memory": 1 << 30, "disk": 1 << 20, "open_files": 64})
                os.write(write_end, json.dumps(_probe(self.folder)).encode())
        os.close(write_end)
        with open(read_end) as file:
            refused = json.loads(file.read() or "{}")
        os.waitpid(pid, 0)
        self._clear_folder()
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.folder}.probe")  # exists if the probe could write it
        filters = ["seccomp"] * self.seccomp
        mechanisms = {
            "network": [*filters, *["a network namespace"] * self.namespaces],
            "files": [f"Landlock {self.landlock}"],
            "processes": filters,
        }
        disk = "a tmpfs of its own" if self.tmpfs else f"checked every {_POLL_S * 1000:g} ms"
        return {name: " and ".join(mechanisms[name]) for name in mechanisms if refused.get(name)} | {"disk": disk}

    def run(self, job: Mapping[str, Any], fds: Sequence[int], channel: socket.socket) -> dict[str, Any]:
        """Runs a program; `fds` are its source, its stdin, stdout and stderr, and what it gets as 3, 4, …"""
        self._prepare_folder(job["disk"])
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            channel.close()
            os.close(read_end)
            _run_and_exit(self._enter(job, fds, write_end))
        os.close(write_end)
        for fd in fds:
            os.close(fd)
        with open(read_end) as file:
            error = file.read()  # returns once the program is isolated
        end = "not isolated" if error else self._watch(pid, job, channel)
        _, status, usage = os.wait4(pid, 0)
        self._kill_orphans()
        self._clear_folder()
        code = os.waitstatus_to_exitcode(status)
        return {"end": end, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime, "error": error}

    def _enter(self, job: Mapping[str, Any], fds: Sequence[int], errors: int) -> Callable[[], None]:
        """Isolates this process, a fork of the jail; returns a function that runs the program."""
        with _ForkGuard(errors, on_success=False) as guard:
            os.setsid()
            system.set_parent_death_signal(self.pid)
            with open(fds[0], "rb") as file:
                source = file.read()
            *moved, guard.fd = _move_up((*fds[1:], errors))
            for number, fd in enumerate(moved):
                os.dup2(fd, number)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd >= len(moved) and fd != guard.fd:
                    _close(fd)
            os.environ.clear()
            os.chdir(self.folder)
            self._isolate(job)
            os.close(guard.fd)
            return lambda: _execute(source)

    def _isolate(self, job: Mapping[str, float]) -> None:
        system.set_limits(job)
        system.drop_privileges()
        if self.landlock:
            landlock.restrict(self.folder, self.readable)
        if self.seccomp:
            seccomp.install_filter(deny_truncate=self.landlock < 3)

    def _watch(self, pid: int, job: Mapping[str, Any], channel: socket.socket) -> str:
        """Waits until the program ends, or kills it at a limit; returns what ended it."""
        deadline = time.monotonic() + job["wall_s"]
        process = os.pidfd_open(pid)
        sources: list[Any] = [process, channel]
        try:
            while True:
                left = deadline - time.monotonic()
                ready = select.select(sources, [], [], max(0.0, min(left, _POLL_S)))[0]
                if process in ready:
                    return "exited"
                end = "stopped" if channel in ready else "timeout" if left <= 0 else self._exceeded_limit(pid, job)
                if end:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    return end
        finally:
            os.close(process)

    def _exceeded_limit(self, pid: int, job: Mapping[str, Any]) -> str:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            threads = next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
            if threads > job["threads"]:
                return "threads"
        return "disk" if not self.tmpfs and _exceeds(self.folder, job["disk"]) else ""

    def _kill_orphans(self) -> None:
        """Kills processes the program left behind. seccomp prevents any; this is a second line of defence."""
        for _ in range(100):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.001)
            except ChildProcessError:
                return

    def _can_mount(self) -> bool:
        try:
            system.mount_tmpfs(self.folder, 1 << 20, 16)
            system.unmount(self.folder)
        except OSError:
            return False
        return True

    def _prepare_folder(self, size: int) -> None:
        if self.tmpfs:
            system.mount_tmpfs(self.folder, size, _MAX_INODES)

    def _clear_folder(self) -> None:
        if self.tmpfs:
            system.unmount(self.folder)
        elif os.listdir(self.folder):  # rm copes with folders nested deeper than Python can follow
            subprocess.run(["/bin/rm", "-rf", self.folder], check=False)
            os.makedirs(self.folder, mode=0o700, exist_ok=True)


class _ForkGuard:
    """Ends a fork in which something fails before it is isolated, which must never run on; writes the error to `fd`."""

    def __init__(self, fd: int, on_success: bool = True) -> None:
        self.fd, self.on_success = fd, on_success

    def __enter__(self) -> "_ForkGuard":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            os.write(self.fd, f"{type(error).__name__}: {error}".encode())
        if error is not None or self.on_success:
            os._exit(1)


def _probe(folder: str) -> dict[str, bool]:
    """Tries what each protection must prevent; returns whether it was refused."""

    def refused(attempt: Callable[[], Any]) -> bool:
        try:
            attempt()
        except OSError:
            return True
        return False

    def fork() -> None:
        if not os.fork():
            os._exit(0)

    def connect() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # sends nothing; fails if there is no route

    return {
        "network": refused(connect),
        "files": refused(lambda: os.close(os.open(f"{folder}.probe", os.O_CREAT | os.O_WRONLY))),
        "processes": refused(fork),
    }


def _exceeds(folder: str, max_bytes: int) -> bool:
    """Whether a folder holds more bytes or files than a program may write."""
    size = count = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > max_bytes or count > _MAX_INODES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue  # the program removed it meanwhile
        except OSError:
            return True  # nested so deep that its path is too long
    return False


def _move_up(fds: Sequence[int]) -> list[int]:
    """Copies descriptors to high numbers, in rising order, so that none is overwritten before it is moved."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in fds]


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the listing includes its own, closed by now
        os.close(fd)


def _run_and_exit(program: Callable[[], None]) -> None:
    """Runs a program and exits as the interpreter would; does not return."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if not isinstance(e.code, int | None):
            print(e.code, file=sys.stderr)
    except MemoryError:
        code = MEMORY_EXIT_CODE
    except BaseException as e:
        frame = e.__traceback__  # without the three frames of the jail
        for _ in range(3):
            frame = frame and frame.tb_next
        traceback.print_exception(type(e), e, frame)
    finally:
        code = _shut_down(code)
        os._exit(code & 0xFF)


def _shut_down(code: int) -> int:
    """Joins threads, runs `atexit` functions and flushes the streams; returns the exit code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # for instance a full disk, or a stream that the program has closed
        return code or 1
    return code


def _execute(source: bytes) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    exec(compile(source, "program.py", "exec"), main.__dict__)  # the untrusted program


def serve(channel: socket.socket, setup: Mapping[str, Any]) -> None:
    """Runs programs until the other end is closed."""
    folder = setup["folder"]
    os.mkdir(folder, 0o700)
    try:
        jail = Jail(folder, setup["mechanisms"], setup["packages"])
        sys.path.extend(setup["packages"])
        channel.send(json.dumps(jail.protections()).encode())
        while True:
            message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 16)
            if not message:
                return
            if fds:  # else it is a late "stop", for a program that has ended
                channel.send(json.dumps(jail.run(json.loads(message), fds, channel)).encode())
    finally:
        subprocess.run(["/bin/rm", "-rf", folder], check=False)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    for name in _PRELOADED:
        __import__(name)
    gc.freeze()  # a collection would touch, and so copy, the pages that forks share
    channel = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(channel, json.loads(channel.recv(1 << 20)))
