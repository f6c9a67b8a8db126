"""The first process of a box: makes its root, then starts programs, and puts and gets files. It runs in the standard
library alone; the other end is `distflow.sandbox.box.box`.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distflow.sandbox.jail import system

_NEWUSER = 0x10000000
_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mounts, host name, IPC, processes, network
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 0x40000
_ETC = {
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
}
_FOLDERS = ("home", "mnt", "opt", "root", "srv", "var/cache", "var/lib", "var/log", "var/tmp")  # every image has them
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LEAST_PID_MAX = 301
_REAP_S = 0.05  # how often processes are counted, and ended ones are reaped
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    channel = socket.socket(fileno=int(sys.argv[2]))
    setup = json.loads(channel.recv(1 << 20))
    try:
        _unshare()
        pid = os.fork()
    except OSError as e:
        channel.send(json.dumps({"error": str(e)}).encode())
        return
    if pid:
        channel.close()
        os.waitpid(pid, 0)
        return
    system.prctl(1, 9)  # it ends with its parent, and all processes of the box end with it
    try:
        how = _make_root(setup)
    except OSError as e:
        channel.send(json.dumps({"error": f"{e}"}).encode())
        return
    channel.send(json.dumps({"copy": how}).encode())
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(channel, setup)


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    if system.libc.unshare(_NEWUSER | _NAMESPACES) == 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    else:  # root in a container may have no user namespaces
        system.check(system.libc.unshare(_NAMESPACES), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = (source.encode(), target.encode(), kind and kind.encode(), flags, options.encode() or None)
    system.check(system.libc.mount(*given), f"mount {target}")


def _make_root(setup: Mapping[str, Any]) -> str:
    """Makes the file system of the box and enters it; returns how the private copy is made."""
    base, image = setup["folder"], setup["image"]
    _raise_loopback()
    _mount("none", "/", None, _REC | _PRIVATE)
    root = f"{base}/root"
    if setup["writable_image"]:  # it is being built
        os.mkdir(root)
        _mount(image, root, None, _BIND)
        how = "none"
    else:
        _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, f"size={setup['disk']},mode=755")
        how = _private_copy(base, root, image, setup["overlay"])
    for path in setup["shown"]:
        _show(path, root)
    for name in _FOLDERS:
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name, text in _ETC.items():
        if not os.path.lexists(f"{root}/etc/{name}"):
            os.makedirs(f"{root}/etc", exist_ok=True)
            with open(f"{root}/etc/{name}", "w") as file:
                file.write(text)
    _make_devices(root)
    os.makedirs(f"{root}/proc", exist_ok=True)
    with contextlib.suppress(OSError):  # in a container that hides parts of it
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
        _limit_processes(root, setup["processes"])
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    os.chdir(root)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(0, f"boxes are not made for {platform.machine()}")
    system.check(system.libc.syscall(number, b".", b"."), "pivot_root")
    system.check(system.libc.umount2(b".", 2), "umount")
    os.chdir("/")
    return how


def _private_copy(base: str, root: str, image: str, overlay: bool) -> str:
    """Copies on write where the kernel can, else now."""
    for name in ("upper", "work", "root"):
        os.mkdir(f"{base}/{name}")
    if overlay:
        options = f"lowerdir={image},upperdir={base}/upper,workdir={base}/work,userxattr"
        with contextlib.suppress(OSError):
            _mount("overlay", root, "overlay", 0, options)
            return "overlay"
    shutil.copytree(image, root, symlinks=True, dirs_exist_ok=True)
    _mount(root, root, None, _BIND)  # a mount point, to become the root
    return "copied"


def _limit_processes(root: str, most: int) -> None:
    """Limits the processes of this namespace, which RLIMIT_NPROC does not do for root; since Linux 6.14."""
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release and (int(release[1]), int(release[2])) >= (6, 14):  # of an older one it is the machine's limit
        with contextlib.suppress(OSError), open(f"{root}/proc/sys/kernel/pid_max", "w") as file:
            file.write(str(max(_LEAST_PID_MAX, most + 64)))  # room for this process to start one


def _kill_too_many(most: int) -> None:
    """Ends all processes of the box if they are too many, where nothing else limits them."""
    with contextlib.suppress(OSError):
        if sum(name.isdigit() for name in os.listdir("/proc")) > most + 1:
            os.kill(-1, signal.SIGKILL)


def _show(path: str, root: str) -> None:
    """Shows a file or folder of this machine in the box, to be read only; a link is made again."""
    target = root + path
    if os.path.lexists(target) and not os.path.isdir(path):
        return  # the image has its own
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        with contextlib.suppress(FileExistsError):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "a").close()
    _mount(path, target, None, _BIND | _REC)
    locked = os.statvfs(path).f_flag & 0x40E  # options that a mount has may not be dropped in a user namespace
    _mount(path, target, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | locked)


def _raise_loopback() -> None:
    """Switches on the only interface of the network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _make_devices(root: str) -> None:
    os.makedirs(f"{root}/dev", exist_ok=True)
    _mount("tmpfs", f"{root}/dev", "tmpfs", _NOSUID, "size=64m,mode=755")
    for name in _DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm", 0o1777)


def _serve(channel: socket.socket, setup: Mapping[str, Any]) -> None:
    """Does what it is asked to until the other end is closed."""
    system.prctl(4, 0)  # no other process may read its memory and descriptors
    while True:
        while not select.select([channel], [], [], _REAP_S)[0]:
            _reap()
            _kill_too_many(setup["processes"])
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not message:
            return
        job = json.loads(message)
        if job["op"] == "stop":  # late: the program has ended
            continue
        try:
            reply = _OPERATIONS[job["op"]](job, fds, channel, setup)
        except (OSError, tarfile.TarError) as e:
            reply = {"error": str(e)}
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        channel.send(json.dumps(reply).encode())


def _run(job: Mapping[str, Any], fds: Sequence[int], channel: socket.socket, setup: Mapping[str, Any]) -> Any:
    pid = _fork()
    if not pid:
        try:
            _execute(job, fds[0], setup)
        except OSError as e:
            os.write(2, f"{e}\n".encode())
        finally:
            os._exit(127)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    deadline, status, ended = time.monotonic() + job["wall_s"], None, False
    with _pidfd(pid, poll):
        while status is None:
            ready = poll.poll(1000 * max(0.0, min(_REAP_S, deadline - time.monotonic())))
            if not ended and (time.monotonic() >= deadline or (channel.fileno(), select.POLLIN) in ready):
                ended = True
                poll.unregister(channel.fileno())
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            status = _reap().get(pid)
            _kill_too_many(setup["processes"])
    return {"code": os.waitstatus_to_exitcode(status), "timeout": ended}


def _fork() -> int:
    """Forks, even if the processes in the background are as many as there may be: then they end."""
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            return os.fork()
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while _reap():
            pass
        time.sleep(0.01)
    return os.fork()


@contextlib.contextmanager
def _pidfd(pid: int, poll: Any) -> Iterator[None]:
    process = os.pidfd_open(pid)
    poll.register(process, select.POLLIN)
    try:
        yield
    finally:
        os.close(process)


def _execute(job: Mapping[str, Any], output: int, setup: Mapping[str, Any]) -> None:
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 16)
    limits = {
        resource.RLIMIT_DATA: setup["memory"],
        resource.RLIMIT_FSIZE: setup["disk"],
        resource.RLIMIT_NPROC: setup["processes"],
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    system.drop_privileges(visible=True)
    os.chdir(job["cwd"])
    os.execvpe(job["argv"][0], job["argv"], job["env"])


def _put(job: Mapping[str, Any], fds: Sequence[int], *_: Any) -> Any:
    """Unpacks an archive into a folder; in place of what is there, if so asked."""
    path = job["path"]
    if job["instead"] and os.path.lexists(path):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
    os.makedirs(path, exist_ok=True)
    with tarfile.open(fileobj=os.fdopen(os.dup(fds[0]), "rb")) as archive:
        archive.extractall(path, filter="tar")
    return {}


def _get(job: Mapping[str, Any], fds: Sequence[int], *_: Any) -> Any:
    """Copies a file to the descriptor, or the beginning of it."""
    fd = os.open(job["path"], os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return {"error": f"{job['path']} is no file"}
        left = job["most"]
        while left and (data := os.read(fd, min(left, 1 << 20))):
            os.write(fds[0], data)
            left -= len(data)
        return {"size": os.fstat(fd).st_size}
    finally:
        os.close(fd)


def _reap() -> dict[int, int]:
    """Returns the status of processes that have ended: orphans become this one's."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while len(ended) < 64 and (found := os.waitpid(-1, os.WNOHANG))[0]:  # a fork bomb always has more
            ended[found[0]] = found[1]
    return ended


_OPERATIONS = {"run": _run, "put": _put, "get": _get}
