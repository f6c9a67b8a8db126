"""What the sandbox asks of Linux that Python has no words for."""

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping

libc = ctypes.CDLL(None, use_errno=True)

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _CAPBSET_DROP, _SUBREAPER = 1, 4, 38, 24, 36  # options of prctl
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 8, 0x4000, 0x40000, 2


def checked(result: int, what: str) -> int:
    """`result`, unless it says that the system refused."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> None:
    given = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    checked(libc.prctl(option, *given), f"prctl({option})")


def new_namespaces() -> bool:
    """Leave the network, the mounts and the shared memory of the machine behind, if the system lets us."""
    pid = os.fork()  # half of it would be worse than nothing: somebody else tries first
    if not pid:
        os._exit(0 if _leave() else 1)
    return os.waitpid(pid, 0)[1] == 0 and _leave()


def _leave() -> bool:
    uid, gid = os.getuid(), os.getgid()
    apart = _NEWNET | _NEWNS | _NEWIPC | _NEWUTS
    if libc.unshare(_NEWUSER | apart) == 0:
        try:
            for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
        except OSError:
            return False
    elif libc.unshare(apart) != 0:  # root in a container may be without user namespaces
        return False
    return bool(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0)


def mount_tmpfs(folder: str, size: int, inodes: int) -> None:
    options = f"size={size},nr_inodes={inodes},mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options), "mount tmpfs")


def unmount(folder: str) -> None:
    checked(libc.umount2(folder.encode(), _MNT_DETACH), "umount")


def adopt_orphans() -> None:
    prctl(_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    prctl(_PDEATHSIG, 9)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def renounce() -> None:
    """No privilege is left, and none comes back. Root keeps what a file's owner may do."""
    prctl(_DUMPABLE, 0)  # a limit of 0 for core files does not keep them from a program that collects them
    prctl(_NO_NEW_PRIVS, 1)
    for capability in range(64):
        with contextlib.suppress(OSError):  # we may not, or there are fewer
            prctl(_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit(job: Mapping[str, float]) -> None:
    """Hard limits of the process; without privileges they cannot be raised again."""
    cpu = max(1, round(job["cpu_s"] + 0.499))
    each: dict[int, float | tuple[int, int]] = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_FSIZE: job["disk"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for which, most in each.items():
        soft, hard = most if isinstance(most, tuple) else (int(most), int(most))
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))
