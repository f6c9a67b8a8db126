"""Holes that walls had: other ways to reach sockets, names, limits of the host, packages, threads and disks."""

import errno
import os
import socket
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from distflow.sandbox.jail import disk
from distflow.sandbox.sandbox import ProgramLimits, Sandbox, SandboxError
from distflow.sandbox.walls import MECHANISMS, REQUIRED
from sandbox.jails import ATTEMPT, assert_refused, missing_protection, run_in_container

X86 = os.uname().machine == "x86_64"
CHECK = [sys.executable, "-m", "distflow.sandbox"]


def test_sockets_by_path_from_a_pair(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A datagram socket reaches any other by its path, whatever the network namespace; descriptors go with it."""
    monkeypatch.chdir(tmp_path)  # a path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind("outside")
        outside.setblocking(False)
        address = os.path.relpath(tmp_path / "outside", "/")
        program = ATTEMPT + (
            "import array, socket\nos.chdir('/')\n"
            "for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):\n"
            "    attempt('pair', lambda: socket.socketpair(socket.AF_UNIX, kind))\n"
            "    number = 53 if os.uname().machine == 'x86_64' else 199\n"
            "    attempt('raw pair', lambda: call(number, 1, kind, 0, bytes(8)))\n"
            "a, b = socket.socketpair()\n"
            f"attempt('sendto', lambda: a.sendto(b'x', {address!r}))\n"
            f"attempt('sendmsg', lambda: a.sendmsg([b'x'], [], 0, {address!r}))\n"
            "right = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))]\n"
            "attempt('descriptor', lambda: a.sendmsg([b'x'], right))\n"
            f"attempt('connect', lambda: a.connect({address!r}))\n"
            "attempt('bind', lambda: a.bind('mine'))\n"
            "attempt('listen', lambda: a.listen())\n"
            "a.sendall(b'ping'); assert b.recv(4) == b'ping'\n"  # what remains
        )
        result = sandbox.run(program)
        assert_refused(result)
        assert result.status == "ok", result
        with pytest.raises(BlockingIOError):
            outside.recv(1)


def test_a_network_namespace_alone_is_no_wall(tmp_path: Path) -> None:
    if missing_protection(MECHANISMS):
        pytest.skip(missing_protection(MECHANISMS))
    with pytest.raises(SandboxError, match="cannot keep code off the network"):
        Sandbox(mechanisms=("namespaces", "landlock"), accept_missing=["processes"])


def test_names_of_files_that_others_make(sandbox: Sandbox, tmp_path: Path) -> None:
    program = ATTEMPT + (
        "import fcntl\n"
        "attempt('inotify', lambda: call(294 if os.uname().machine == 'x86_64' else 26, 0))\n"
        "here = os.open('.', os.O_RDONLY)\n"
        "attempt('dnotify', lambda: fcntl.fcntl(here, fcntl.F_NOTIFY, 4))\n"
        f"attempt('list', lambda: os.listdir({str(tmp_path)!r}))\n"
    )
    assert_refused(sandbox.run(program))


def test_limits_that_all_processes_share(sandbox: Sandbox) -> None:
    program = ATTEMPT + (
        "import fcntl\n"
        "attempt('aio', lambda: call(206 if os.uname().machine == 'x86_64' else 0, 1000, bytes(8)))\n"
        "r, w = os.pipe()\n"
        "attempt('pipe', lambda: fcntl.fcntl(w, 1031, 1 << 20))\n"
        "attempt('lease', lambda: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0))\n"
    )
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok", result


def test_packages_beside_the_standard_library(sandbox: Sandbox) -> None:
    """The folder of installed packages is one of the standard library's, or beside it, and not readable."""
    own = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    folders = [p for p in (own, "/usr/lib/python3/dist-packages") if os.path.isdir(p) and os.listdir(p)]
    if not folders:
        pytest.skip("no interpreter here has packages")
    program = ATTEMPT + "import importlib\n"
    for folder in folders:
        names = [p.name for p in Path(folder).iterdir() if (p / "__init__.py").exists()][:3]
        program += f"attempt('list', lambda: os.listdir({folder!r}))\nsys.path.append({folder!r})\n"
        program += f"attempt('read', lambda: [open(f'{folder}/{{n}}/__init__.py').read() for n in {names!r}][0])\n"
        program += f"for name in {names!r}:\n    try: importlib.import_module(name); print('OUT', name)\n"
        program += "    except ImportError: print('no ', name)\n"
    # The standard library is, also what has not been imported before, and after its listing was forgotten.
    program += "importlib.invalidate_caches()\nimport wave, xml.dom.minidom, unittest.mock, sqlite3\n"
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok", result


# A loop of machine code: clone with the flags of a thread, or fewer; the new thread pauses for ever.
CLONES = """
import ctypes, mmap, struct
m = mmap.mmap(-1, 1 << 16, prot=7)
start = ctypes.addressof(ctypes.c_char.from_buffer(m))
code = b'\\xb8' + struct.pack('<I', 56) + b'\\xbf' + struct.pack('<I', FLAGS)
code += b'\\x48\\xbe' + struct.pack('<Q', start + 60000)
code += b'\\x31\\xd2\\x4d\\x31\\xd2\\x4d\\x31\\xc0\\x0f\\x05\\x85\\xc0'
code += LOOP
code += b'\\xb8' + struct.pack('<I', 34) + b'\\x0f\\x05\\xeb\\xf7'
m[: len(code)] = code
print(ctypes.CFUNCTYPE(ctypes.c_int)(start)(), flush=True)
"""


@pytest.mark.skipif(not X86, reason="the machine code is that of x86_64")
def test_a_burst_of_threads(sandbox: Sandbox) -> None:
    """Each thread waits until it is counted, so that there are never more than the limit, however fast they come."""
    if sandbox.protections["threads"] != "seccomp":
        pytest.skip("threads are counted now and then here")
    loop = "b'\\x75' + struct.pack('b', -len(code) - 2)"
    most = 0
    run = sandbox.start(
        CLONES.replace("FLAGS", "0x50f00").replace("LOOP", loop), (), ProgramLimits(wall_s=60, threads=16)
    )
    ended = threading.Event()

    def count() -> None:
        nonlocal most
        children = Path(f"/proc/{sandbox._jail._process.pid}/task/{sandbox._jail._process.pid}/children")
        while not ended.is_set():
            for pid in children.read_text().split():
                try:
                    most = max(most, len(os.listdir(f"/proc/{pid}/task")))
                except OSError:
                    continue

    counting = threading.Thread(target=count)
    counting.start()
    result = run.wait()
    ended.set()
    counting.join()
    assert result.reason == "it had more than 16 threads", result
    assert most <= 16


@pytest.mark.skipif(not X86, reason="the machine code is that of x86_64")
def test_a_thread_with_descriptors_of_its_own(sandbox: Sandbox) -> None:
    """Such a thread could open as many files again as the program may."""
    loop = "b'\\x74\\x01\\xc3'"  # unless this is the new thread, return
    result = sandbox.run(CLONES.replace("FLAGS", "0x50b00").replace("LOOP", loop))
    assert result.stdout == f"{-errno.EPERM}\n", result


def test_files_that_were_removed_but_are_open(sandbox: Sandbox) -> None:
    program = (
        "import mmap, os, time\n"
        "files = []\n"
        "for i in range(20):\n"
        "    file = open(str(i), 'wb+'); os.unlink(str(i)); file.write(bytes(1 << 20)); file.flush()\n"
        "    KEEP\n"
        "    time.sleep(0.02)\n"
        "print('OUT')"
    )
    for keep in ("files.append(file)", "files.append(mmap.mmap(file.fileno(), 1 << 20)); file.close()"):
        result = sandbox.run(program.replace("KEEP", keep))
        assert "OUT" not in result.stdout, result
        assert "No space left" in result.stderr or "4 MB" in result.reason, result


def test_files_that_were_removed_and_closed_do_not_count(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert disk.count_files(str(tmp_path), 1 << 19, os.getpid()) < 0
        os.unlink(tmp_path / "file")
        assert disk.count_files(str(tmp_path), 1 << 19, os.getpid()) < 0
    assert disk.count_files(str(tmp_path), 1 << 19, os.getpid()) == 0


# --- a wall that is missing ---

REFUSED = {
    "landlock": (
        {"landlock_create_ruleset": errno.EPERM},
        "files",
        "Landlock is refused here (Operation not permitted)",
    ),
    "landlock, its last step": ({"landlock_restrict_self": errno.EPERM}, "files", "Landlock is refused here"),
    "no landlock": ({"landlock_create_ruleset": errno.ENOSYS}, "files", "use Linux ≥ 5.13 built with it"),
    "landlock off": (
        {"landlock_create_ruleset": errno.EOPNOTSUPP},
        "files",
        "add `landlock` to the kernel's parameter",
    ),
    "seccomp": ({"seccomp": errno.EPERM}, "processes", "seccomp is refused here (Operation not permitted)"),
    "namespaces": ({"unshare": errno.EPERM}, "note", "user namespaces are refused here (Operation not permitted)"),
    "mounts": ({"mount": errno.EPERM}, "note", "allows `unshare` and `mount`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_container_refuses_is_named_with_the_cure(case: str) -> None:
    if missing_protection(MECHANISMS):
        pytest.skip(missing_protection(MECHANISMS))
    refused, protection, message = REFUSED[case]
    done = run_in_container(refused, CHECK)
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert message in lines[protection], done
    assert "; " in lines[protection]  # the cure
    needed = {name for name, (_, mechanism) in REQUIRED.items() if protection in REQUIRED and case.find(mechanism) >= 0}
    assert {name for name in REQUIRED if "NO: cannot" in lines[name]} == needed, done


def test_a_run_does_not_start_without_a_wall() -> None:
    if missing_protection(MECHANISMS):
        pytest.skip(missing_protection(MECHANISMS))
    command = [sys.executable, "-c", "from distflow.reward.code import unit_tests; unit_tests.prepare()"]
    done = run_in_container({"seccomp": errno.EPERM}, command)
    last = done.stderr.splitlines()[-1]
    assert "the sandbox for code cannot keep code off the network: seccomp is refused here" in last, done
    assert last.endswith("`args: {accept_missing: [network, processes]}` of the reward function")
    assert run_in_container({"unshare": errno.EPERM, "mount": errno.EPERM}, command).returncode == 0
