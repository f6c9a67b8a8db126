"""Boxes from outside: see distflow.sandbox.box.

A box shows the programs and libraries of this machine (`/usr`, …) and the Python that runs here, to be read only, under
a root of its own: a private copy of an image's files, made on write. What runs in it is root of that box, without any
capability. It sees no process, network, home directory or temporary file of the machine.
"""

import contextlib
import io
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = str(Path(__file__).parent.parent)
_START_S = 30.0  # for a box to start
_GRACE_S = 5.0
# A box has the standard library and this folder alone, under the name that it has here.
_ENTRY = """
import sys, types
for name, path in (("distflow", []), ("distflow.sandbox", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from distflow.sandbox.box.init import main
main()
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "ssl")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BoxError(Exception):
    """A box cannot be made here, or is gone."""


@dataclass(frozen=True)
class BoxLimits:
    """`memory_mb` is for each process, `disk_mb` for all files that a box writes."""

    memory_mb: int = 2048
    disk_mb: int = 512
    processes: int = 256
    output_kb: int = 256  # of a program; what is in the middle of more is dropped


@dataclass(frozen=True)
class BoxResult:
    """The end of a program: its exit code, or minus the signal; what it wrote to stdout and stderr together."""

    code: int
    output: str
    timeout: bool = False


class Box:
    """`image` is a folder; its files are the box's, as they are when the box begins.

    With `writable_image` what happens in the box happens to the folder: so images are built. `shown`: further paths of
    this machine that can be read. Tests try it without `overlay`.
    """

    def __init__(
        self,
        image: Path,
        limits: BoxLimits | None = None,
        shown: Sequence[str] = (),
        writable_image: bool = False,
        overlay: bool = True,
    ) -> None:
        if sys.platform != "linux":
            raise BoxError("boxes need Linux")
        self.limits = limits or BoxLimits()
        self._channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.mkdtemp(prefix="distflow-box-")
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _ENTRY, _FOLDER, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                env={},
                cwd="/",
                start_new_session=True,
            )
        etc = [f"/etc/{name}" for name in _ETC]
        pythons = [p for p in {sys.prefix, sys.base_prefix} if not p.startswith("/usr")]
        setup = {
            "folder": self._folder,
            "image": str(image.absolute()),
            "shown": [p for p in (*_SYSTEM, *etc, *pythons, *shown) if os.path.lexists(p)],
            "writable_image": writable_image,
            "overlay": overlay,
            "memory": self.limits.memory_mb << 20,
            "disk": self.limits.disk_mb << 20,
            "processes": self.limits.processes,
        }
        self._channel.settimeout(_START_S)
        reply = self._ask(setup)
        if "error" in reply:
            self.close()
            raise BoxError(f"cannot make a box here: {reply['error']}; it needs user namespaces, or to be root")
        self.copy: str = reply["copy"]  # how the private copy was made: overlay, copied

    def run(
        self, argv: Sequence[str], cwd: str = "/", env: Mapping[str, str] | None = None, wall_s: float = 30.0
    ) -> BoxResult:
        """Runs a program to its end, or to the time limit. Its background processes go on."""
        variables = {"PATH": f"{sys.prefix}/bin:{_PATH}", "HOME": "/root", "LANG": "C.UTF-8", **(env or {})}
        read_end, write_end = os.pipe()
        job = {"op": "run", "argv": list(argv), "cwd": cwd, "env": variables, "wall_s": wall_s}
        try:
            self._send(job, write_end)
        finally:
            os.close(write_end)
        try:
            report, output = self._collect(read_end, time.monotonic() + wall_s + _GRACE_S)
        finally:
            os.close(read_end)
        return BoxResult(report["code"], output, report["timeout"])

    def put(self, path: str, files: Mapping[str, bytes] | Path, instead: bool = False) -> None:
        """Puts files, by their names, or those of a folder, into a folder of the box; `instead` of what it has."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            if isinstance(files, Path):
                archive.add(files, arcname=".", filter=_as_root)
            else:
                for name, content in files.items():
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mode, entry.mtime = len(content), 0o644, int(time.time())
                    archive.addfile(entry, io.BytesIO(content))
        fd = os.memfd_create("files", os.MFD_CLOEXEC)
        try:
            with open(os.dup(fd), "wb") as file:
                file.write(data.getbuffer())
            os.lseek(fd, 0, os.SEEK_SET)
            self._done({"op": "put", "path": path, "instead": instead}, fd)
        finally:
            os.close(fd)

    def get(self, path: str, most: int = 1 << 20) -> bytes | None:
        """Returns what a file has, up to so many bytes; None if there is none."""
        fd = os.memfd_create("file", os.MFD_CLOEXEC)
        try:
            reply = self._ask({"op": "get", "path": path, "most": most}, fd)
            os.lseek(fd, 0, os.SEEK_SET)
            return None if "error" in reply else os.read(fd, most)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Ends the box: its processes and files are gone."""
        self._channel.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], [] if fd is None else [fd])
        except OSError as e:
            raise BoxError(f"the box is gone: {e}") from e

    def _receive(self) -> Any:
        try:
            message = self._channel.recv(1 << 16)
        except OSError as e:
            raise BoxError(f"the box does not answer: {e}") from e
        if not message:
            raise BoxError("the box is gone; see what it wrote to stderr")
        return json.loads(message)

    def _ask(self, message: Mapping[str, Any], fd: int | None = None) -> Any:
        self._send(message, fd)
        return self._receive()

    def _done(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        if "error" in (reply := self._ask(message, fd)):
            raise BoxError(f"{message['op']}: {reply['error']}")

    def _collect(self, pipe: int, deadline: float) -> tuple[Any, str]:
        """Reads what a program writes until it ends: processes in the background may keep the pipe open."""
        kept, report = _Kept(self.limits.output_kb << 10), None
        os.set_blocking(pipe, False)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            while report is None:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise BoxError("the box does not answer")
                for key, _ in ready:
                    if key.fileobj is self._channel:
                        report = self._receive()
                    elif not kept.read(pipe):
                        selector.unregister(pipe)
        while kept.read(pipe):
            pass
        if "error" in report:
            raise BoxError(report["error"])
        return report, kept.text()


class _Kept:
    """The beginning and the end of an output."""

    def __init__(self, most: int) -> None:
        self._half, self._head, self._tail, self._dropped = most // 2, bytearray(), bytearray(), 0

    def read(self, pipe: int) -> bool:
        """Reads what there is now; False if there is nothing."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(0, room) :]
        if (over := len(self._tail) - self._half) > 0:
            self._dropped += over
            del self._tail[:over]
        return bool(data)

    def text(self) -> str:
        middle = f"\n… {self._dropped:,} bytes are left out …\n".encode() if self._dropped else b""
        return (self._head + middle + self._tail).decode(errors="replace")


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry
