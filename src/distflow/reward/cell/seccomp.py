"""seccomp: system calls that a program with one process and some files never needs are refused by the system."""

import ctypes
import errno
import os
import struct

from distflow.reward.cell.system import checked, libc

# name: its number on x86_64 and on aarch64; -1 where there is none. Refused whatever the arguments.
_DENIED = {
    # the network; what is left is socketpair, which asyncio needs
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes: to start, to see, to signal, to slow down
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # what Landlock does not guard: modes, owners, attributes and times of files that can be seen
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # memory that no limit counts, or that outlives the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # the machine itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "acct": (163, 89), "syslog": (103, 116), "iopl": (172, -1), "ioperm": (173, -1), "personality": (135, 92),
}  # fmt: skip
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # their arguments are out of sight; callers know a substitute
_LOOKED_AT = {
    "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "socketpair": (53, 199), "prctl": (157, 167),
    "prlimit64": (302, 261), "fcntl": (72, 25), "ioctl": (16, 29), "open": (2, -1), "openat": (257, 56),
    "truncate": (76, 45),
}  # fmt: skip

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, mark of its system calls

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x54, 0x06, 0x15, 0x35, 0x45
_X32 = 0x40000000  # a second set of numbers for the same calls
_THREAD, _O_TRUNC, _O_ACCMODE, _AF_UNIX = 0x10000, 0x200, 3, 1

Step = tuple[int, int, int, int]  # operation, steps to skip if true, if false, operand


def available() -> bool:
    """Whether this machine's calls are known here, and its system filters them."""
    return os.uname().machine in _MACHINES and libc.prctl(21, 0, 0, 0, 0) >= 0


def refuse(truncate: bool) -> None:
    """For this process and for good; `truncate` if nothing else keeps it from truncating files it can see."""
    steps = _program(os.uname().machine, os.getpid(), truncate)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(packed))
    buffer = ctypes.create_string_buffer(header)
    checked(libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(buffer)), 0, 0), "seccomp")


def _program(machine: str, pid: int, truncate: bool) -> list[Step]:
    column, mark = _MACHINES[machine]
    no, unknown = _end(_REFUSE | errno.EPERM), _end(_REFUSE | errno.ENOSYS)
    steps: list[Step] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, mark), _end(_KILL), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), unknown]
    rules = {name: [no] for name in _DENIED} | {name: [unknown] for name in _ABSENT}
    rules["clone"] = [_argument(0), (_ANY_BIT, 1, 0, _THREAD), no]
    for name in ("kill", "tgkill"):
        rules[name] = [_argument(0), (_EQUAL, 1, 0, pid), no]
    rules["socketpair"] = [_argument(0), (_EQUAL, 1, 0, _AF_UNIX), no]
    rules["prlimit64"] = [_argument(0), (_EQUAL, 1, 0, 0), no]
    rules["prctl"] = _unless(_argument(0), 1, 4)  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE
    # Whoever owns a descriptor is sent a signal of one's choice: F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP.
    rules["fcntl"] = _unless(_argument(1), 8, 10, 15)
    rules["ioctl"] = _unless(_argument(1), 0x8901, 0x8902)
    # To open for reading and truncate on the way is no writing to the first versions of Landlock.
    for name, flags in (("open", 1), ("openat", 2)):
        rules[name] = [_argument(flags), (_AND, 0, 0, _O_TRUNC | _O_ACCMODE), (_EQUAL, 0, 1, _O_TRUNC), no]
    if truncate:
        rules["truncate"] = [no]
    for name, rule in rules.items():
        number = (_DENIED | _ABSENT | _LOOKED_AT)[name][column]
        if number >= 0:
            ended = rule if rule[-1][0] == _RETURN and len(rule) == 1 else [*rule, _end(_ALLOW)]
            steps += [(_EQUAL, 0, len(ended), number), *ended]
    return [*steps, _end(_ALLOW)]


def _end(verdict: int) -> Step:
    return (_RETURN, 0, 0, verdict)


def _argument(i: int) -> Step:
    return (_LOAD, 0, 0, 16 + 8 * i)  # the lower half, on machines that store it first


def _unless(argument: Step, *values: int) -> list[Step]:
    """Refused if it is any of these."""
    no = _end(_REFUSE | errno.EPERM)
    return [argument, *(step for value in values for step in ((_EQUAL, 0, 1, value), no))]
