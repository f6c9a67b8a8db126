"""The jail's main loop: forks this small interpreter for each program, isolates the fork, and watches it.

The other end is `distflow.sandbox.sandbox`. The jail itself never reads a program or its input, so a fork
cannot find those of others in its memory.
"""

import contextlib
import fcntl
import gc
import glob
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.sandbox.jail import disk, landlock, program, seccomp, system

_POLL_S = 0.05  # how often limits that the kernel does not enforce are checked
# Imported once, before any fork: what programs import most, and what runs their tests.
_COMMON = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")
_PRELOADED = (*_COMMON, "distflow.sandbox.remote_tests")
_GATE = b"gate"  # a message with a descriptor
_DEVICES = ("/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")
_PACKAGES = ("*-packages", "python*/*-packages")  # where the interpreters of a system have installed packages


class Jail:
    """Runs programs in `folder`; they may import the standard library and what is in the folders `packages`.

    It uses the `mechanisms` that this machine has; `refusals` has the error numbers of the others.
    """

    def __init__(self, folder: str, mechanisms: Sequence[str], packages: Sequence[str]) -> None:
        self.folder, self.work, self.pid = folder, f"{folder}/work", os.getpid()
        os.mkdir(self.work, 0o700)
        os.chmod(folder, 0o500)  # a program may write to all of it, but only in `work` there is a limit
        attempts = {
            "namespaces": system.new_namespaces,
            "landlock": lambda: self._restrict(landlock.make_ruleset(landlock.version(), folder, ())),
            "seccomp": lambda: self._install(seccomp.Filter(deny_truncate=True)),
        }
        self.refusals = {name: system.refusal(attempts[name]) for name in attempts if name in mechanisms}
        self.namespaces, use_landlock, use_seccomp = (self.refusals.get(name) == 0 for name in attempts)
        self.gated = use_seccomp and not system.refusal(self._open_gate)
        if self.namespaces:
            system.new_namespaces()
        self.landlock = landlock.version() if use_landlock else 0
        self.ruleset = -1
        if use_landlock:  # at a number that no descriptor of a program has
            [self.ruleset] = _move_up([landlock.make_ruleset(self.landlock, folder, _readable(packages))])
        self.filter = seccomp.Filter(deny_truncate=self.landlock < 3) if use_seccomp else None
        system.adopt_orphans()
        self.tmpfs = self.namespaces and self._can_mount()

    def protections(self) -> dict[str, str]:
        """Returns the protections that work and the mechanism behind each; an isolated fork tries to break them."""
        read_end, write_end = os.pipe()
        self._prepare_folder(1 << 20)
        path = os.path.basename(self.folder)  # which is in the working directory: paths of sockets must be short
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
            outside.bind(f"{path}.socket")
            pid = os.fork()
            if not pid:
                with _ForkGuard(write_end):
                    self._isolate({"cpu_s": 5, "memory": 1 << 30, "disk": 1 << 20, "open_files": 64}, None)
                    os.write(write_end, json.dumps(_probe(path)).encode())
            os.close(write_end)
            with open(read_end) as file:
                refused = json.loads(file.read() or "{}")
            os.waitpid(pid, 0)
        self._clear_folder()
        for name in (f"{path}.socket", f"{path}.probe"):  # the second exists if the probe could write it
            with contextlib.suppress(FileNotFoundError):
                os.remove(name)
        filters = ["seccomp"] * bool(self.filter)
        mechanisms = {
            "network": [*filters, *["a network namespace"] * self.namespaces],
            "files": [f"Landlock {self.landlock}"],
            "processes": filters,
        }
        polled = f"checked every {_POLL_S * 1000:g} ms"
        return {name: " and ".join(mechanisms[name]) for name in mechanisms if refused.get(name)} | {
            "disk": "a tmpfs of its own" if self.tmpfs else f"seccomp and {polled}" if self.gated else polled,
            "threads": "seccomp" if self.gated else polled,
        }

    def run(self, job: Mapping[str, Any], fds: Sequence[int], channel: socket.socket) -> dict[str, Any]:
        """Runs a program; `fds` are its source, its stdin, stdout and stderr, and what it gets as 3, 4, …"""
        self._prepare_folder(job["disk"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            channel.close()
            ours.close()
            program.run_and_exit(self._enter(job, fds, theirs.fileno()))
        theirs.close()
        for fd in fds:
            os.close(fd)
        error, gates = _receive_isolation(ours)
        end = "not isolated" if error else self._watch(pid, job, channel, gates)
        for gate in gates:
            os.close(gate)
        _, status, usage = os.wait4(pid, 0)
        self._kill_orphans()
        self._clear_folder()
        code = os.waitstatus_to_exitcode(status)
        return {"end": end, "code": code, "cpu_s": usage.ru_utime + usage.ru_stime, "error": error}

    def _enter(self, job: Mapping[str, Any], fds: Sequence[int], reports: int) -> Callable[[], None]:
        """Isolates this process, a fork of the jail; returns a function that runs the program."""
        with _ForkGuard(reports, on_success=False) as guard:
            os.setsid()
            system.set_parent_death_signal(self.pid)
            with open(fds[0], "rb") as file:
                source = file.read()
            *moved, guard.fd = _move_up((*fds[1:], reports))
            for number, fd in enumerate(moved):
                os.dup2(fd, number)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd >= len(moved) and fd not in (guard.fd, self.ruleset):
                    _close(fd)
            os.environ.clear()
            os.chdir(self.work)
            self._isolate(job, guard.fd)
            os.close(guard.fd)
            return lambda: program.execute(source)

    def _isolate(self, job: Mapping[str, Any], reports: int | None) -> None:
        """Isolates this process; sends the gate through which it starts threads and files to `reports`."""
        system.set_limits(job)
        # Without a file system of its own, the files that it has removed and still uses are counted from outside.
        system.drop_privileges(visible=bool(self.landlock and not self.tmpfs))
        if self.landlock:
            self._restrict(self.ruleset)
        if self.gated and reports is not None:
            gate = seccomp.install_gate(files=not self.tmpfs)
            system.raise_limit_of_open_files()
            with socket.socket(fileno=os.dup(reports)) as sock:
                socket.send_fds(sock, [_GATE], [gate])
            os.close(gate)
        system.set_limit_of_open_files(job["open_files"])
        if self.filter:
            self._install(self.filter)

    def _restrict(self, ruleset: int) -> None:
        system.forbid_new_privileges()
        landlock.restrict(ruleset)
        os.close(ruleset)

    def _install(self, calls: seccomp.Filter) -> None:
        system.forbid_new_privileges()
        calls.install()

    def _open_gate(self) -> int:
        system.forbid_new_privileges()
        return seccomp.install_gate(files=True)

    def _watch(self, pid: int, job: Mapping[str, Any], channel: socket.socket, gates: Sequence[int]) -> str:
        """Waits until the program ends, or kills it at a limit; returns what ended it."""
        deadline = time.monotonic() + job["wall_s"]
        process = os.pidfd_open(pid)
        poll = select.poll()
        for fd in (process, channel.fileno(), *gates):
            poll.register(fd, select.POLLIN)
        files = None if self.tmpfs else _Files(self.work, job["disk"], pid)
        try:
            while True:
                left = deadline - time.monotonic()
                ready = dict(poll.poll(1000 * max(0.0, min(left, _POLL_S))))
                if process in ready:
                    return "exited"
                waiting = [g for g in gates if ready.get(g, 0) & select.POLLIN]
                requests = [(gate, *request) for gate in waiting if (request := seccomp.receive_request(gate))]
                starting = sum(is_thread for _, _, is_thread in requests)
                end = "stopped" if channel.fileno() in ready else "timeout" if left <= 0 else ""
                if not end and _threads(pid) + starting > job["threads"]:
                    end = "threads"
                if not end and files and files.exceed(len(requests) - starting):
                    end = "disk"
                if end:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    return end
                for gate, number, _ in requests:
                    seccomp.let_go_on(gate, number)
                for gate in ready.keys() & set(gates) - set(waiting):  # the last thread has ended
                    poll.unregister(gate)
        finally:
            os.close(process)

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
            system.mount_tmpfs(self.work, 1 << 20, 16)
            system.unmount(self.work)
        except OSError:
            return False
        return True

    def _prepare_folder(self, size: int) -> None:
        if self.tmpfs:
            system.mount_tmpfs(self.work, size, disk.MAX_INODES)

    def _clear_folder(self) -> None:
        if self.tmpfs:
            system.unmount(self.work)
        elif os.listdir(self.work):
            os.chmod(self.folder, 0o700)
            _remove(self.work)
            os.mkdir(self.work, 0o700)
            os.chmod(self.folder, 0o500)


class _Files:
    """Limits what a program writes where it has no file system of its own.

    What is there is measured from time to time. Between two measurements a program cannot write much more than it may:
    each file that it creates lowers the size that the kernel allows to any of them.
    """

    def __init__(self, folder: str, max_bytes: int, pid: int) -> None:
        self._folder, self._max_bytes, self._pid = folder, max_bytes, pid
        self._count, self._measured = 0, time.monotonic()

    def exceed(self, created: int) -> bool:
        """Returns whether a program has written more than it may, when it is about to create so many files."""
        self._count += created
        doubled = created and self._count & (self._count - 1) == 0
        if doubled or time.monotonic() - self._measured >= _POLL_S:
            found = disk.count_files(self._folder, self._max_bytes, self._pid)
            self._count, self._measured = found + created, time.monotonic()
            if found < 0:
                return True
        if created:
            self._lower(self._max_bytes // max(1, self._count))
        return False

    def _lower(self, size: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has been killed meanwhile
            if size < resource.prlimit(self._pid, resource.RLIMIT_FSIZE)[1]:
                resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size, size))


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


def _probe(path: str) -> dict[str, bool]:
    """Attempts the actions that each protection must prevent; returns whether they were refused."""

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

    def send_by_path() -> None:  # which no network namespace prevents
        for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
            s.sendto(b"", f"{path}.socket")

    return {
        "network": refused(connect) and refused(send_by_path),
        "files": refused(lambda: os.close(os.open(f"{path}.probe", os.O_CREAT | os.O_WRONLY))),
        "processes": refused(fork),
    }


def _readable(packages: Sequence[str]) -> list[str]:
    """Returns the paths that programs may read: the standard library, shared libraries, and of packages only these."""
    roots = {os.path.realpath(path) for path in (os.path.dirname(os.__file__), *_LIBRARIES)}
    hidden = {path for root in roots for pattern in _PACKAGES for path in glob.glob(f"{root}/{pattern}")}
    shown = [path for root in roots for path in landlock.without(root, hidden)]
    return [*shown, *packages, *_TIME_ZONES, *_DEVICES]


def _keep_listings() -> None:
    """Keeps the list of modules of the standard library: a program that may not see the packages beside them cannot
    list their folder."""
    for finder in sys.path_importer_cache.values():
        if finder is not None and hasattr(finder, "_fill_cache"):
            finder._fill_cache()
            finder._fill_cache = lambda: None


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
    return 0


def _receive_isolation(reports: socket.socket) -> tuple[str, list[int]]:
    """Returns once a program is isolated, with the gate of its threads; or with the reason why it is not."""
    error, gates = b"", list[int]()
    with reports:
        while True:
            message, fds, _, _ = socket.recv_fds(reports, 1 << 12, 1)
            gates += fds
            if not message:
                return error.decode(errors="replace"), gates
            if message != _GATE:
                error = message


def _remove(folder: str) -> None:
    """Removes a folder with all that is in it; rm copes with folders nested deeper than Python can follow."""
    subprocess.run(["/bin/rm", "-rf", folder], check=False)


def _move_up(fds: Sequence[int]) -> list[int]:
    """Copies descriptors to high numbers, in rising order, so that none is overwritten before it is moved."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in fds]


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the listing includes its own, closed by now
        os.close(fd)


def serve(channel: socket.socket, setup: Mapping[str, Any]) -> None:
    """Runs programs until the other end is closed."""
    folder = setup["folder"]
    os.chdir(os.path.dirname(folder))
    try:
        jail = Jail(folder, setup["mechanisms"], setup["packages"])
        sys.path.extend(setup["packages"])
        channel.send(json.dumps({"protections": jail.protections(), "refusals": jail.refusals}).encode())
        while True:
            message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 16)
            if not message:
                return
            if fds:  # else it is a late "stop", for a program that has ended
                channel.send(json.dumps(jail.run(json.loads(message), fds, channel)).encode())
    finally:
        os.chmod(folder, 0o700)
        _remove(folder)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    for name in _PRELOADED:
        __import__(name)
    _keep_listings()
    gc.freeze()  # a collection would touch, and so copy, the pages that forks share
    channel = socket.socket(fileno=int(sys.argv[2]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(channel, json.loads(channel.recv(1 << 20)))
