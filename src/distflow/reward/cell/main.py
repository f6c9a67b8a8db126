"""The loop of a cell: for each program a fork of this small, empty interpreter, put behind walls and watched.

The other end is `distflow.reward.sandbox`. A cell itself reads no program and no data, so that none is left to find.
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

from distflow.reward.cell import landlock, seccomp, system

_TICK_S = 0.05  # how often it is looked at what no limit of the system covers
_INODES = 4096  # files and folders a program may make
_MEMORY_CODE = 77  # exit code after a MemoryError that nobody caught
# What programs import most, and what judges them, imported once.
_WARM = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")
_JUDGE = "distflow.reward.witness"
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_CLOCKS = ("/usr/share/zoneinfo", "/etc/localtime")


class Cell:
    """`walls` are those to try; `packages` are folders that programs may import from besides the standard library."""

    def __init__(self, folder: str, walls: Sequence[str], packages: Sequence[str]) -> None:
        self.folder, self.packages = folder, packages
        self.apart = "namespaces" in walls and system.new_namespaces()
        self.landlock = landlock.version() if "landlock" in walls else 0
        self.seccomp = "seccomp" in walls and seccomp.available()
        self.pid = os.getpid()
        self.readable = (os.path.dirname(os.__file__), *packages, *_LIBRARIES, *_CLOCKS, *_DEVICES)
        system.adopt_orphans()
        self.tmpfs = self.apart and self._can_mount()

    def tried(self) -> dict[str, str]:
        """What holds, and by what: a program behind the walls has tried each."""
        ours, theirs = os.pipe()
        self._prepare(1 << 20)
        pid = os.fork()
        if not pid:
            with _last_words(theirs):
                self._wall_in({"cpu_s": 5, "memory": 1 << 30, "disk": 1 << 20, "open_files": 64})
                os.write(theirs, json.dumps(_attempts(self.folder)).encode())
        os.close(theirs)
        with open(ours) as told:
            held = json.loads(told.read() or "{}")
        os.waitpid(pid, 0)
        self._clear()
        filters = ["seccomp"] * self.seccomp
        by = {
            "network": [*filters, *["a network namespace"] * self.apart],
            "files": [f"Landlock {self.landlock}"],
            "processes": filters,
        }
        found = {name: " and ".join(by[name]) for name in by if held.get(name)}
        return found | {"disk": "a tmpfs of its own" if self.tmpfs else f"a look every {_TICK_S * 1000:g} ms"}

    def run(self, job: Mapping[str, Any], fds: Sequence[int], line: socket.socket) -> dict[str, Any]:
        """`fds`: the program, its stdin, stdout and stderr, and what else it is given as 3, 4, …"""
        self._prepare(job["disk"])
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            line.close()
            os.close(ours)
            _become(self._start(job, fds, theirs))
        os.close(theirs)
        for fd in fds:
            os.close(fd)
        with open(ours) as told:
            trouble = told.read()  # ends when the walls are up
        how = "broken" if trouble else self._watch(pid, job, line)
        _, status, used = os.wait4(pid, 0)
        self._end_orphans()
        self._clear()
        code = os.waitstatus_to_exitcode(status)
        return {"how": how, "code": code, "cpu_s": used.ru_utime + used.ru_stime, "trouble": trouble}

    def _start(self, job: Mapping[str, Any], fds: Sequence[int], told: int) -> Callable[[], None]:
        """In the child: build the walls; what is returned runs the program."""
        with _last_words(told, on_success=False) as words:
            os.setsid()
            system.die_with_parent(self.pid)
            with open(fds[0], "rb") as file:
                source = file.read()
            *moved, words.fd = _out_of_the_way((*fds[1:], told))
            for number, fd in enumerate(moved):
                os.dup2(fd, number)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd >= len(moved) and fd != words.fd:
                    _close(fd)
            os.environ.clear()
            os.chdir(self.folder)
            self._wall_in(job)
            os.close(words.fd)
            return lambda: _run(source)

    def _wall_in(self, job: Mapping[str, float]) -> None:
        system.limit(job)
        system.renounce()
        if self.landlock:
            landlock.confine(self.folder, self.readable)
        if self.seccomp:
            seccomp.refuse(truncate=self.landlock < 3)

    def _watch(self, pid: int, job: Mapping[str, Any], line: socket.socket) -> str:
        """Until it ends; what ended it."""
        end = time.monotonic() + job["wall_s"]
        ended = os.pidfd_open(pid)
        sources: list[Any] = [ended, line]
        try:
            while True:
                left = end - time.monotonic()
                ready = select.select(sources, [], [], max(0.0, min(left, _TICK_S)))[0]
                if ended in ready:
                    return "ended"
                how = "stopped" if line in ready else "timeout" if left <= 0 else self._excess(pid, job)
                if how:
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                    return how
        finally:
            os.close(ended)

    def _excess(self, pid: int, job: Mapping[str, Any]) -> str:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            threads = next((int(row.split()[1]) for row in file if row.startswith("Threads:")), 0)
            if threads > job["threads"]:
                return "threads"
        return "disk" if not self.tmpfs and _overfull(self.folder, job["disk"]) else ""

    def _end_orphans(self) -> None:
        """There should be none: a second look."""
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

    def _prepare(self, size: int) -> None:
        if self.tmpfs:
            system.mount_tmpfs(self.folder, size, _INODES)

    def _clear(self) -> None:
        if self.tmpfs:
            system.unmount(self.folder)
        elif os.listdir(self.folder):  # folders may be nested deeper than Python can follow
            subprocess.run(["/bin/rm", "-rf", self.folder], check=False)
            os.makedirs(self.folder, mode=0o700, exist_ok=True)


class _last_words:  # noqa: N801
    """Whatever goes wrong in a child before the walls are up is told, and ends it: it must never return."""

    def __init__(self, fd: int, on_success: bool = True) -> None:
        self.fd, self.on_success = fd, on_success

    def __enter__(self) -> "_last_words":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            os.write(self.fd, f"{type(error).__name__}: {error}".encode())
        if error is not None or self.on_success:
            os._exit(1)


def _attempts(folder: str) -> dict[str, bool]:
    def refused(attempt: Callable[[], Any]) -> bool:
        try:
            attempt()
        except OSError:
            return True
        return False

    def fork() -> None:
        if not os.fork():
            os._exit(0)

    def reach() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # sends nothing; without a way out it fails

    return {
        "network": refused(reach),
        "files": refused(lambda: os.close(os.open(f"{folder}.probe", os.O_CREAT | os.O_WRONLY))),
        "processes": refused(fork),
    }


def _overfull(folder: str, most: int) -> bool:
    size = count = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if size > most or count > _INODES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except OSError:
            return True  # its name is longer than the system takes
    return False


def _out_of_the_way(fds: Sequence[int]) -> list[int]:
    """Copies with high numbers, so that none is overwritten before it is moved; in rising order."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in fds]


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the list of open files was open itself
        os.close(fd)


def _become(program: Callable[[], None]) -> None:
    """Run it as the interpreter would have run it; does not return."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if not isinstance(e.code, int | None):
            print(e.code, file=sys.stderr)
    except MemoryError:
        code = _MEMORY_CODE
    except BaseException as e:
        inner = e.__traceback__ and e.__traceback__.tb_next and e.__traceback__.tb_next.tb_next
        traceback.print_exception(type(e), e, inner and inner.tb_next)
    finally:
        code = _finish(code)
        os._exit(code & 0xFF)


def _finish(code: int) -> int:
    """Threads, functions of `atexit`, buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # such as a full disk, or a stream that the program has closed
        return code or 1
    return code


def _run(source: bytes) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    exec(compile(source, "program.py", "exec"), main.__dict__)  # what a sandbox is for


def serve(line: socket.socket, setup: Mapping[str, Any]) -> None:
    """Until the other end is closed."""
    folder = setup["folder"]
    os.mkdir(folder, 0o700)
    try:
        cell = Cell(folder, setup["walls"], setup["packages"])
        sys.path.extend(setup["packages"])
        line.send(json.dumps(cell.tried()).encode())
        while True:
            message, fds, _, _ = socket.recv_fds(line, 1 << 16, 16)
            if not message:
                return
            if fds:  # else it is a late word to stop
                line.send(json.dumps(cell.run(json.loads(message), fds, line)).encode())
    finally:
        subprocess.run(["/bin/rm", "-rf", folder], check=False)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us decides
    for name in (*_WARM, _JUDGE):
        __import__(name)
    gc.freeze()  # collecting what is shared would copy it
    line = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(line, json.loads(line.recv(1 << 20)))
