"""Linux system calls that the jail needs and Python does not wrap."""

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Callable, Mapping

libc = ctypes.CDLL(None, use_errno=True)

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _CAPBSET_DROP, _SUBREAPER = 1, 4, 38, 24, 36  # options of prctl
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 8, 0x4000, 0x40000, 2


def check(result: int, call: str) -> int:
    """Returns the result of a system call; raises if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *padded), f"prctl({option})")


def refusal(attempt: Callable[[], object]) -> int:
    """Tries something in a fork, which then ends; returns the number of the error, 0 if there was none."""
    pid = os.fork()
    if not pid:
        number = errno.EPERM
        try:
            attempt()
            number = 0
        except OSError as e:
            number = e.errno or number
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def new_namespaces() -> None:
    """Moves this process to its own network, mount, IPC and host name namespaces."""
    uid, gid = os.getuid(), os.getgid()
    namespaces = _NEWNET | _NEWNS | _NEWIPC | _NEWUTS
    if libc.unshare(_NEWUSER | namespaces) == 0:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    else:  # root in a container may have no user namespaces
        check(libc.unshare(namespaces), "unshare")
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")


def mount_tmpfs(folder: str, size: int, inodes: int) -> None:
    options = f"size={size},nr_inodes={inodes},mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), "mount tmpfs")


def unmount(folder: str) -> None:
    check(libc.umount2(folder.encode(), _MNT_DETACH), "umount")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has died."""
    prctl(_SUBREAPER, 1)


def set_parent_death_signal(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    prctl(_PDEATHSIG, 9)
    if os.getppid() != parent:  # it had died before the prctl
        os._exit(1)


def forbid_new_privileges() -> None:
    """Gives up new privileges: only then may a process without any restrict itself."""
    prctl(_NO_NEW_PRIVS, 1)


def drop_privileges(visible: bool) -> None:
    """Gives up all capabilities for good. Root keeps the rights of a file's owner.

    If it is `visible`, processes of the same user see which files this one has open.
    """
    prctl(_DUMPABLE, int(visible))
    forbid_new_privileges()
    with contextlib.suppress(OSError):  # not permitted, or past the last capability
        for capability in range(64):
            prctl(_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def set_limits(job: Mapping[str, float]) -> None:
    """Sets hard resource limits, which a process without privileges cannot raise again."""
    cpu = max(1, round(job["cpu_s"] + 0.499))
    limits: dict[int, float | tuple[int, int]] = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_FSIZE: job["disk"],
        resource.RLIMIT_CORE: 1,  # no core dump; with 0, there would be one if it is piped to a program
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for which, limit in limits.items():
        soft, hard = limit if isinstance(limit, tuple) else (int(limit), int(limit))
        _set_limit(which, soft, hard)


def set_limit_of_open_files(count: int) -> None:
    """Sets the limit of descriptors, which the kernel also takes as that of all the user's descriptors in flight: once
    it is set, this process cannot send any if another one, such as a browser, has more under way."""
    _set_limit(resource.RLIMIT_NOFILE, count, count)


def raise_limit_of_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_limit(which: int, soft: int, hard: int) -> None:
    ceiling = resource.getrlimit(which)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(which, (soft, hard))
