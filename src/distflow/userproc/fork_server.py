"""The process that others are forked from: loads users' code once, then forks a process per request.

`python -m distflow.userproc.fork_server`; whatever users' code prints goes to stderr.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distflow.errors import DistflowError
from distflow.userproc.die_with_parent import die_with_parent
from distflow.userproc.server_process import describe_exit

_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """Forks a child per request, in which `run` serves the worker; reaps it, and kills what it leaves behind."""

    def __init__(self, control: socket.socket, run: Callable[[socket.socket], None]) -> None:
        self._control, self._run = control, run
        self._serials: dict[int, int] = {}  # pid of a child → its serial number
        self._lines, self._descriptors = b"", deque[int]()
        gc.collect()
        gc.freeze()  # children write to no page only because they collect garbage
        _adopt_orphans()
        self._own = set(_children())  # processes that the users' modules have started
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._wake_end = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Runs until the worker closes the channel."""
        while True:
            readable, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    while self._wake.recv(4096):
                        pass
                self._reap()
            if self._control in readable:
                data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
                if not data:
                    return
                self._descriptors += descriptors
                *lines, self._lines = (self._lines + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    channel, pipe = self._descriptors.popleft(), self._descriptors.popleft()
                    self._fork(request["fork"], channel, pipe)

    def _fork(self, serial: int, channel: int, pipe: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            self._send({"exited": serial, "how": f"could not be forked: {e}; run fewer at once, or free memory"})
            pid = -1
        if pid == 0:
            try:
                self._become_child(channel, pipe, parent)
                self._run(socket.socket(fileno=channel))
                sys.stderr.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(channel)
        os.close(pipe)
        if pid > 0:
            self._serials[pid] = serial

    def _become_child(self, channel: int, pipe: int, parent: int) -> None:
        os.setsid()  # whatever it starts is killed with its process group
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._wake, self._wake_end):
            end.close()
        for descriptor in self._descriptors:  # of the next children
            os.close(descriptor)
        die_with_parent(pipe, parent)
        _adopt_orphans()  # so that the server adopts none of a living child's

        def close_inherited() -> None:  # a fork of the user's code must not speak for it, nor keep the channel open
            os.close(channel)
            os.close(pipe)

        os.register_at_fork(after_in_child=close_inherited)

    def _reap(self) -> None:
        for pid in list(self._serials):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # before we reap it, as its number is still its own
            _, status = os.waitpid(pid, 0)
            how = describe_exit(os.waitstatus_to_exitcode(status))
            self._send({"exited": self._serials.pop(pid), "how": how})
        for pid in _children():
            if pid not in self._serials and pid not in self._own:  # left its group, and its parent is dead
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()]
    except OSError:  # another system
        return []


def main() -> None:
    descriptor, pipe, parent = map(int, sys.argv[1:])
    die_with_parent(pipe, parent)
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    os.set_inheritable(pipe, False)
    setup = json.loads(_read_line(control))
    if setup["path"]:
        sys.path[:] = setup["path"]
    module = importlib.import_module(setup["module"])
    try:
        shared, answer = module.prepare(setup["arguments"])
    except DistflowError as e:
        control.sendall(json.dumps({"load_error": str(e)}).encode() + b"\n")
        return
    server = ForkServer(control, lambda channel: module.serve(shared, channel))
    control.sendall(json.dumps({"ready": answer}).encode() + b"\n")
    server.serve()


def _read_line(control: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = control.recv(1 << 16)
        if not data:
            sys.exit(1)
        line += data
    return line


if __name__ == "__main__":
    main()
