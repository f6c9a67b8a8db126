"""seccomp: denies the system calls that a single process with a few files does not need."""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence

from distflow.sandbox.jail.system import check, libc

# Name: numbers on x86_64 and on aarch64, -1 where it does not exist. Denied whatever the arguments.
_DENIED = {
    # the network; a pair of connected streams remains, which asyncio needs: nothing else can be done with it
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes: starting, inspecting, signalling and slowing them down
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # what Landlock does not cover: modes, owners, attributes and times of visible files, names of files in any folder
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # memory that no limit counts or that outlives the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "modify_ldt": (154, -1),
    # memory, semaphores and queues of other processes: their numbers can be guessed
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # the machine itself; io_setup takes from a limit that all processes share
    "io_setup": (206, 0), "sync": (162, 81), "syncfs": (306, 267),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "quotactl": (179, 60), "quotactl_fd": (443, 443), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "acct": (163, 89), "syslog": (103, 116), "iopl": (172, -1), "ioperm": (173, -1), "personality": (135, 92),
}  # fmt: skip
# A filter cannot see the arguments of the first two, the third fills a disk at once; callers fall back to other calls.
_NOT_IMPLEMENTED = {"clone3": (435, 435), "openat2": (437, 437), "copy_file_range": (326, 285)}
_BY_ARGUMENT = {
    "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "socketpair": (53, 199), "prctl": (157, 167),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "sendto": (44, 206), "fcntl": (72, 25), "ioctl": (16, 29),
    "open": (2, -1), "openat": (257, 56), "creat": (85, -1), "mknod": (133, -1), "mknodat": (259, 33),
    "truncate": (76, 45), "fallocate": (285, 47),
}  # fmt: skip

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH value
_SECCOMP = (317, 277)

_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_LOAD, _AND, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x54, 0x06, 0x15, 0x35, 0x45
_X32 = 0x40000000  # set in the numbers of the x32 ABI, a second table of the same calls
_THREAD = 0x10000 | 0x400 | 0x200  # flags of clone: a thread, with the same descriptors and working directory
_O_CREATE, _O_TRUNC, _O_ACCMODE, _AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 0x40 | 0x400000, 0x200, 3, 1, 1, 0xF
_NEW_LISTENER, _RECEIVE, _SEND, _CONTINUE = 8, 0xC0502100, 0xC0182101, 1

Instruction = tuple[int, int, int, int]  # of BPF: opcode, instructions to skip if true, if false, operand


class Filter:
    """A filter of system calls, made once and then installed by many processes."""

    def __init__(self, deny_truncate: bool) -> None:
        """Builds the filter; older versions of Landlock need `deny_truncate`."""
        self._machine = _machine()
        self._common = _pack(_common_rules(self._machine, deny_truncate))

    def install(self) -> None:
        """Filters the calls of this process for good."""
        _install(_pack(_own_rules(self._machine, os.getpid())) + self._common, 0)


def install_gate(files: bool) -> int:
    """Makes every thread wait before it starts, and with `files` before it creates a file; returns the descriptor with
    which another process lets it go on."""
    column, architecture = _MACHINES[_machine()]
    program = _check_architecture(architecture) + _rule(_BY_ARGUMENT["clone"][column], [_return(_NOTIFY)])
    for name in ("creat", "mknod", "mknodat") if files else ():
        program += _rule(_BY_ARGUMENT[name][column], [_return(_NOTIFY)])
    for name, flags in (("open", 1), ("openat", 2)) if files else ():
        creates = [_argument(flags), (_ANY_BIT, 0, 1, _O_CREATE), _return(_NOTIFY)]
        program += _rule(_BY_ARGUMENT[name][column], creates)
    return _install(_pack([*program, _return(_ALLOW)]), _NEW_LISTENER)


def receive_request(gate: int) -> tuple[int, bool] | None:
    """Returns the number of the request that waits at the gate, and whether it is for a thread; None if it is gone."""
    request = bytearray(80)
    try:
        fcntl.ioctl(gate, _RECEIVE, request)
    except FileNotFoundError:  # it has been killed meanwhile
        return None
    number, call = struct.unpack_from("Q8xi", request)
    return number, call == _BY_ARGUMENT["clone"][_MACHINES[_machine()][0]]


def let_go_on(gate: int, number: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # it has been killed meanwhile
        fcntl.ioctl(gate, _SEND, struct.pack("QqiI", number, 0, 0, _CONTINUE))


def _machine() -> str:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: the system calls of {machine} are not known here")
    return machine


def _pack(program: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *i) for i in program)


def _install(program: bytes, flags: int) -> int:
    instructions = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    number = _SECCOMP[_MACHINES[_machine()][0]]
    return check(libc.syscall(number, 1, flags, ctypes.create_string_buffer(header)), "seccomp")


def _check_architecture(architecture: int) -> list[Instruction]:
    """Kills the process at a call of another table, such as that of 32 bits; leaves the number of the call loaded."""
    return [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), _return(_KILL), (_LOAD, 0, 0, 0)]


def _own_rules(machine: str, pid: int) -> list[Instruction]:
    """Returns how a filter begins: a process may send signals to itself alone."""
    column, architecture = _MACHINES[machine]
    program = _check_architecture(architecture)
    for name in ("kill", "tgkill"):
        program += _rule(_BY_ARGUMENT[name][column], _require(0, pid))
    return program


def _common_rules(machine: str, deny_truncate: bool) -> list[Instruction]:
    """Returns how a filter goes on, the same in every process."""
    column, _ = _MACHINES[machine]
    deny, not_implemented = _return(_ERRNO | errno.EPERM), _return(_ERRNO | errno.ENOSYS)
    program = [(_AT_LEAST, 0, 1, _X32), not_implemented] if machine == "x86_64" else []
    rules = {name: [deny] for name in _DENIED} | {name: [not_implemented] for name in _NOT_IMPLEMENTED}
    rules["clone"] = _require(0, _THREAD, mask=_THREAD)
    rules["socketpair"] = _require(0, _AF_UNIX) + _require(1, _SOCK_STREAM, mask=_SOCK_TYPE)
    rules["sendto"] = _require(4, 0) + _require(4, 0, upper=True)  # without an address: to the other end of a pair
    # RLIMIT_CORE: 1 is the one value with which no program is called to write a core dump.
    rules["prlimit64"] = _require(0, 0) + _deny_if(1, 4)
    rules["setrlimit"] = _deny_if(0, 4)
    rules["prctl"] = _deny_if(0, 1, 4)  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE
    # These make a descriptor send signals to any process: F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP.
    # F_SETLEASE and F_NOTIFY act on what others do with a file, F_SETPIPE_SZ takes from a limit of the user.
    rules["fcntl"] = _deny_if(1, 8, 10, 15, 1024, 1026, 1031)
    rules["ioctl"] = _deny_if(1, 0x8901, 0x8902, 0x40049409, 0x4020940D)  # the last two, FICLONE…, fill a disk
    # O_RDONLY | O_TRUNC truncates a file, which the first versions of Landlock do not count as writing.
    for name, flags in (("open", 1), ("openat", 2)):
        rules[name] = [_argument(flags), (_AND, 0, 0, _O_TRUNC | _O_ACCMODE), (_EQUAL, 0, 1, _O_TRUNC), deny]
    rules["fallocate"] = [_return(_ERRNO | errno.EOPNOTSUPP)]  # it fills a disk at once; callers write instead
    if deny_truncate:
        rules["truncate"] = [deny]
    for name, rule in rules.items():
        program += _rule((_DENIED | _NOT_IMPLEMENTED | _BY_ARGUMENT)[name][column], rule)
    return [*program, _return(_ALLOW)]


def _rule(number: int, rule: list[Instruction]) -> list[Instruction]:
    """Applies a rule to the call with this number; a rule that denies only some calls allows the others."""
    if number < 0:
        return []
    body = rule if len(rule) == 1 else [*rule, _return(_ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _argument(i: int, upper: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * i + 4 * upper)  # half of it, on little-endian machines


def _require(i: int, value: int, mask: int = 0xFFFFFFFF, upper: bool = False) -> list[Instruction]:
    """Denies the call unless a half of argument `i`, or of it the bits of `mask`, is `value`."""
    return [_argument(i, upper), (_AND, 0, 0, mask), (_EQUAL, 1, 0, value), _return(_ERRNO | errno.EPERM)]


def _deny_if(i: int, *values: int) -> list[Instruction]:
    """Denies the call if argument `i` is any of `values`."""
    deny = _return(_ERRNO | errno.EPERM)
    return [_argument(i), *(instruction for value in values for instruction in ((_EQUAL, 0, 1, value), deny))]
