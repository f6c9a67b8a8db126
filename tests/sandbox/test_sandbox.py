"""Tries every usual way out of a sandbox. Skips, with the reason, what this machine cannot prevent."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from distflow.sandbox.__main__ import report
from distflow.sandbox.sandbox import ProgramLimits, ProgramResult, Sandbox, SandboxError
from distflow.sandbox.walls import MECHANISMS, REQUIRED
from limits import wait_until
from reward.helpers import gone, pids_in
from sandbox.jails import ATTEMPT, LIMITS, assert_refused, missing_protection

# --- how a program ends ---


def test_a_program_reads_computes_and_prints(plain: Sandbox) -> None:
    program = "import sys, math, json\nprint(math.prod(map(int, input().split())))\nprint('two', file=sys.stderr)"
    assert plain.run(program, "6 7\n") == ProgramResult("ok", 0, "42\n", "two\n")
    text = "print(sum(map(ord, input())))\nif __name__ == '__main__': print('é')"
    assert plain.run(text, "é").stdout == "233\né\n"


def test_exceptions_and_exit_codes(plain: Sandbox) -> None:
    result = plain.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert (result.status, result.code, result.stdout) == ("error", 1, "before\n")
    assert result.stderr.splitlines()[1] == '  File "program.py", line 4, in <module>'
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in plain.run("def").stderr
    assert plain.run("raise SystemExit(3)") == ProgramResult("error", 3, "", "", "it exited with 3")
    assert plain.run("raise SystemExit('why')").stderr == "why\n"
    assert plain.run("import sys; sys.exit()").status == "ok"
    assert plain.run("import os; os._exit(256 + 5)").code == 5
    assert plain.run("import atexit; atexit.register(print, 'last')").stdout == "last\n"
    assert plain.run("import threading as t, time; t.Timer(0.05, print, ['late']).start()").stdout == "late\n"


def test_the_standard_library_works(plain: Sandbox) -> None:
    program = (
        "import asyncio, concurrent.futures as c, dataclasses, datetime, decimal, sqlite3, tempfile, zoneinfo\n"
        "async def f(): await asyncio.sleep(0); return 1\n"
        "with c.ThreadPoolExecutor(4) as pool: n = sum(pool.map(int, '1234'))\n"
        "with tempfile.NamedTemporaryFile() as f_: f_.write(b'x'); f_.flush()\n"
        "open('mine', 'w').write('x'); import os; os.mkdir('d'); os.rename('mine', 'd/mine'); os.remove('d/mine')\n"
        "print(asyncio.run(f()) + n, sqlite3.connect('db').execute('select 5').fetchone())"
    )
    result = plain.run(program)
    assert result.stdout == "11 (5,)\n", result


def test_descriptors_that_others_of_this_user_have_in_flight_do_not_matter(sandbox: Sandbox) -> None:
    """As browsers and many sandboxes at once do: the kernel counts them by user, against the limit of a program."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(LIMITS.open_files + 64):
            socket.send_fds(ours, [b"x"], [0])
        program = "import os\ntry:\n    while True: os.dup(0)\nexcept OSError as e: print(e.errno)"
        assert sandbox.run(program, limits=LIMITS).stdout == "24\n"


def test_nothing_is_left_for_the_next_program(plain: Sandbox) -> None:
    assert plain.run("import builtins, os; builtins.x = 1; open('left', 'w').write('x'); os.chdir('/')").status == "ok"
    assert plain.run("import os; print(os.listdir('.'))\nprint(x)").stdout == "[]\n"


def test_installed_packages_only_when_asked_for(plain: Sandbox) -> None:
    assert "ModuleNotFoundError" in plain.run("import yaml").stderr
    with Sandbox(packages=True) as sandbox:
        assert sandbox.run("import yaml; print(yaml.safe_load('3'))").stdout == "3\n"


# --- bombs ---


def test_infinite_loop(plain: Sandbox) -> None:
    result = plain.run("while True: pass", limits=ProgramLimits(cpu_s=1.0, wall_s=60.0))
    assert (result.status, result.code) == ("timeout", -signal.SIGXCPU)
    assert result.reason == "it used more than 1 s of CPU time"
    deaf = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = plain.run(deaf, limits=ProgramLimits(cpu_s=0.1, wall_s=60.0))
    assert (result.status, result.code) == ("timeout", -signal.SIGKILL)


def test_sleeping_for_ever(sandbox: Sandbox) -> None:
    for program in ("import time; time.sleep(1000)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"):
        result = sandbox.run(program, limits=ProgramLimits(wall_s=0.3))
        assert (result.status, result.reason) == ("timeout", "it took longer than 0.3 s")


def test_memory_bomb(sandbox: Sandbox) -> None:
    for program in ("x = []\nwhile True: x.append(bytearray(1 << 20))", "x = 'a' * (1 << 40)", "x = [0] * (1 << 40)"):
        assert sandbox.run(program, limits=replace(LIMITS, cpu_s=30, wall_s=60)).status == "memory"
    assert "Cannot allocate memory" in sandbox.run("import mmap; mmap.mmap(-1, 1 << 40)").stderr


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    program = (
        "import resource as r\n"
        "for k in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE):\n"
        "    try: r.setrlimit(k, (r.RLIM_INFINITY,) * 2); print('OUT')\n"
        "    except (ValueError, OSError): print('no ')"
    )
    assert_refused(sandbox.run(program))


def test_fork_bomb(sandbox: Sandbox) -> None:
    program = ATTEMPT + (
        "import subprocess, multiprocessing as m\n"
        "attempt('fork', os.fork)\n"
        "attempt('spawn', lambda: subprocess.run(['/bin/true']))\n"
        "attempt('posix_spawn', lambda: os.posix_spawn('/bin/true', ['true'], {}))\n"
        "attempt('system', lambda: os.system('true') and (_ for _ in ()).throw(OSError()))\n"
        "attempt('process', lambda: m.get_context('fork').Process(target=print).start())\n"
        "attempt('exec', lambda: os.execv('/bin/true', ['true']))\n"
        "while True:\n"
        "    try: os.fork()\n"
        "    except OSError: break\n"
    )
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok"


def test_thread_bomb(sandbox: Sandbox) -> None:
    program = (
        "import threading, time\n"
        "threading.stack_size(65536)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    )
    result = sandbox.run(program)
    assert result.status in ("killed", "error"), result


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output(sandbox: Sandbox, stream: str) -> None:
    result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 65536)")
    assert result.status == "output"
    assert len(getattr(result, stream)) == LIMITS.output_kb << 10


def test_one_huge_file(sandbox: Sandbox) -> None:
    program = ATTEMPT + "attempt('write', lambda: [open('f', 'wb').write(bytes(1 << 23)) for _ in range(9)])\n"
    assert_refused(sandbox.run(program + "attempt('grow', lambda: os.truncate('f', 1 << 40))"))


def test_filling_the_disk_with_many_files(sandbox: Sandbox) -> None:
    program = (
        "import time\n"
        "for i in range(99):\n"
        "    open(str(i), 'wb').write(b'x' * (1 << 20))\n"
        "    time.sleep(0.02)\n"
        "print('OUT')"
    )
    result = sandbox.run(program)
    assert "OUT" not in result.stdout
    assert "No space left" in result.stderr or "4 MB" in result.reason or "too large" in result.stderr, result


def test_thousands_of_files(sandbox: Sandbox) -> None:
    program = "import time\nfor i in range(6000):\n    open(str(i), 'w').close()\ntime.sleep(0.5)\nprint('OUT')"
    result = sandbox.run(program)
    assert "OUT" not in result.stdout, result
    nested = "import os\nfor i in range(1100):\n    os.mkdir('d'); os.chdir('d')\nprint('deep')"
    assert sandbox.run(nested).status in ("ok", "killed", "error")
    assert sandbox.run("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_crash(sandbox: Sandbox) -> None:
    result = sandbox.run("import ctypes; ctypes.string_at(0)")
    assert (result.status, result.code, result.reason) == ("killed", -signal.SIGSEGV, "it was killed by SIGSEGV")
    assert sandbox.run("import os; os.abort()").code == -signal.SIGABRT
    assert sandbox.run("print(1)").stdout == "1\n"


# --- files ---


def test_writing_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "weights"
    mine.write_text("precious")
    mine.chmod(0o666)
    tmp_path.chmod(0o777)
    places = [tmp_path / "new", Path.home() / ".sandbox", Path(tempfile.gettempdir()) / "sandbox", Path("/dev/shm/x")]
    places += [Path("/var/tmp/sandbox"), Path("/etc/sandbox"), Path("/proc/self/comm"), Path("/sys/kernel/sandbox")]
    code = Path(sys.modules[Sandbox.__module__].__file__ or "").parent
    for path in (
        code / "remote_tests.py",
        code / "jail" / "main.py",
        Path(os.__file__),
        mine,
    ):  # the sandbox's own code
        assert path.exists()
        places.append(path)
    program = ATTEMPT + "".join(f"attempt('write', lambda: open({str(p)!r}, 'a'))\n" for p in places)
    for what in (
        f"os.truncate({str(mine)!r}, 0)",
        f"os.open({str(mine)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.open({os.__file__!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.remove({str(mine)!r})",
        f"os.rename({str(mine)!r}, 'mine')",
        f"os.link({str(mine)!r}, 'mine')",
        f"os.chmod({str(mine)!r}, 0)",
        f"os.chown({str(mine)!r}, 1, 1)",
        f"os.utime({os.__file__!r})",
        f"os.setxattr({os.__file__!r}, 'user.x', b'x')",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        f"os.symlink('x', {str(tmp_path / 'link')!r})",
        f"os.mknod({str(tmp_path / 'node')!r})",
        "os.mkfifo('/tmp/sandbox-fifo')",
    ):
        program += f"attempt({what!r}, lambda: {what})\n"
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok", result
    assert mine.read_text() == "precious"
    assert os.listdir(tmp_path) == ["weights"]


def test_symbolic_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "weights"
    mine.write_text("precious")
    mine.chmod(0o666)
    program = ATTEMPT + (
        f"os.symlink({str(mine)!r}, 'link'); os.symlink({str(tmp_path)!r}, 'folder'); os.symlink('.', 'round')\n"
        "attempt('read', lambda: open('link').read())\n"
        "attempt('write', lambda: open('link', 'w'))\n"
        "attempt('in', lambda: open('folder/new', 'w'))\n"
        "attempt('up', lambda: open('../new', 'w'))\n"
    )
    assert_refused(sandbox.run(program))
    assert sandbox.run("").status == "ok"  # cleaning up has followed none of them
    assert mine.read_text() == "precious"


def test_reading_secrets(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = ATTEMPT + "import glob\nassert not os.environ, os.environ\n"
    paths = [tmp_path / "token", Path("/etc/passwd"), Path("/proc/self/environ"), Path(f"/proc/{os.getpid()}/environ")]
    paths += [Path(__file__), Path("/proc/1/cmdline"), Path("/proc/self/mem"), Path(f"/proc/{os.getpid()}/fd/0")]
    program += "".join(f"attempt('read', lambda: open({str(p)!r}, 'rb').read())\n" for p in paths)
    program += "attempt('list', lambda: os.listdir('/proc'))\nattempt('home', lambda: os.listdir('/root'))\n"
    program += "libc.getenv.restype = ctypes.c_char_p\nassert libc.getenv(b'HF_TOKEN') is None\n"
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok", result


def test_a_new_jail_has_none_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "very secret")
    with Sandbox() as sandbox:
        result = sandbox.run("import os, ctypes\nprint(dict(os.environ), ctypes.CDLL(None).getenv(b'HF_TOKEN'))")
    assert result.stdout == "{} 0\n"


def test_no_descriptor_is_inherited(sandbox: Sandbox) -> None:
    program = (
        "import os\n"
        "fds = []\n"
        "for fd in range(32):\n"
        "    try: os.fstat(fd); fds.append(fd)\n"
        "    except OSError: pass\n"
        "print(fds)"
    )
    assert sandbox.run(program).stdout == "[0, 1, 2]\n"


# --- the network ---


def test_sockets(sandbox: Sandbox) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        server.listen()
        name = f"sandbox-test-{os.getpid()}"  # another run of these tests may be on this machine
        abstract.bind(f"\0{name}")
        abstract.listen()
        port = server.getsockname()[1]
        program = ATTEMPT + (
            "import socket, urllib.request\n"
            f"attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {port}), 1))\n"
            f"attempt('url', lambda: urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1))\n"
            "attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)))\n"
            "attempt('ipv6', lambda: socket.socket(socket.AF_INET6))\n"
            f"attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r}))\n"
            "attempt('unix', lambda: socket.socket(socket.AF_UNIX))\n"
            "attempt('raw', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))\n"
            "attempt('netlink', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))\n"
            "attempt('vsock', lambda: socket.socket(socket.AF_VSOCK))\n"
            "attempt('dns', lambda: socket.getaddrinfo('example.com', 80))\n"
            "attempt('listen', lambda: socket.create_server(('0.0.0.0', 0)))\n"
        )
        assert_refused(sandbox.run(program))


# --- other processes ---


def test_killing_others(sandbox: Sandbox) -> None:
    victim = subprocess.Popen(["sleep", "100"])
    try:
        program = ATTEMPT + (
            "import fcntl, signal, resource\n"
            f"for pid in (os.getppid(), {os.getpid()}, {victim.pid}, 1, 0, -1):\n"
            "    attempt('kill', lambda: os.kill(pid, 9))\n"
            f"attempt('group', lambda: os.killpg({victim.pid}, 9))\n"
            "tgkill = 234 if os.uname().machine == 'x86_64' else 131\n"
            f"attempt('tgkill', lambda: call(tgkill, {victim.pid}, {victim.pid}, 9))\n"
            f"attempt('pidfd', lambda: os.pidfd_open({victim.pid}))\n"
            f"attempt('limits', lambda: resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (0, 0)))\n"
            f"attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19))\n"
            f"attempt('affinity', lambda: os.sched_setaffinity({victim.pid}, [0]))\n"
            # A pipe that sends a signal to its owner.
            "r, w = os.pipe()\n"
            f"attempt('owner', lambda: fcntl.fcntl(r, fcntl.F_SETOWN, {victim.pid}))\n"
            "attempt('signal', lambda: fcntl.fcntl(r, 10, 9))\n"
            f"attempt('ioctl', lambda: fcntl.ioctl(r, 0x8901, ({victim.pid}).to_bytes(4, 'little')))\n"
        )
        result = sandbox.run(program)
        assert_refused(result)
        assert result.status == "ok", result
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_system_calls_by_hand(sandbox: Sandbox) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers below are those of x86_64")
    numbers = {
        "socket": (41, 2, 1, 0), "socket of the x32 table": (0x40000029, 2, 1, 0), "fork": (57,), "vfork": (58,),
        "clone": (56, 17, 0, 0, 0, 0), "clone3": (435, 0, 0), "ptrace": (101, 16, os.getppid(), 0, 0),
        "process_vm_readv": (310, os.getpid(), 0, 0, 0, 0, 0), "unshare": (272, 0x10000000),
        "mount": (165, 0, 0, 0, 0, 0), "io_uring_setup": (425, 1, 0), "bpf": (321, 0, 0, 0),
        "memfd_create": (319, 0, 0), "shmget": (29, 0, 1 << 20, 0o1600), "keyctl": (250, 0, 0), "setns": (308, 0, 0),
        "shmat": (30, 0, 0, 0), "shmctl": (31, 0, 13, 0), "shmdt": (67, 0), "semop": (65, 0, 0, 1),
        "semctl": (66, 0, 0, 18), "semtimedop": (220, 0, 0, 1, 0), "msgsnd": (69, 0, 0, 0, 0),
        "modify_ldt": (154, 0, 0, 0), "msgrcv": (70, 0, 0, 0, 0, 0), "msgctl": (71, 0, 11, 0), "mq_unlink": (241, 0),
        "mq_notify": (244, 0, 0),
        "fallocate": (285, 0, 0, 0, 1), "copy_file_range": (326, 0, 0, 1, 0, 1, 0),
        "chroot": (161, 0), "userfaultfd": (323, 0), "openat2": (437, 0, 0, 0, 0),
        "open_by_handle_at": (304, 0, 0, 0), "prctl(PDEATHSIG, 0)": (157, 1, 0, 0, 0, 0), "reboot": (169, 0, 0, 0, 0),
    }  # fmt: skip
    program = ATTEMPT + "".join(f"attempt({n!r}, lambda: call(*{a!r}))\n" for n, a in numbers.items())
    result = sandbox.run(program)
    assert_refused(result)
    assert result.status == "ok", result


SHARED = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
memory, queue, semaphore = map(int, "%s".split())
print("memory", libc.shmat(memory, None, 0) not in (None, 2 ** 64 - 1))
print("queue", libc.msgctl(queue, 0, None) == 0)
print("semaphore", libc.semctl(semaphore, 0, 0) == 0)
"""


def test_what_other_processes_share_by_number_is_out_of_reach(sandbox: Sandbox) -> None:
    """System V memory, queues and semaphores: their numbers are small, and a program of the same user may guess."""
    libc = ctypes.CDLL(None, use_errno=True)
    ids = libc.shmget(0, 4096, 0o1666), libc.msgget(0, 0o1666), libc.semget(0, 1, 0o1666)
    assert min(ids) >= 0
    try:
        result = sandbox.run(SHARED % " ".join(map(str, ids)))
        assert result.stdout == "memory False\nqueue False\nsemaphore False\n", result
        assert libc.semctl(ids[2], 0, 12) >= 0  # GETVAL: it is still there
    finally:
        libc.shmctl(ids[0], 0, None)
        libc.msgctl(ids[1], 0, None)
        libc.semctl(ids[2], 0, 0)


MANY_FILES = """
import os
fds = [os.open(f"f{i}", os.O_CREAT | os.O_RDWR) for i in range(24)]
written = 0
for _ in range(64):
    for fd in fds:
        try:
            written += os.write(fd, bytes(1 << 18))
        except OSError:
            pass
print(written)
"""


def test_many_files_hold_no_more_than_one_between_two_checks(sandbox: Sandbox) -> None:
    """Each of them could have 4 MB; without a file system of its own, a program would be faster than the check."""
    result = sandbox.run(MANY_FILES)
    assert result.status == "killed" or int(result.stdout) <= 2 * LIMITS.disk_mb << 20, result
    again = (  # one file, opened again and again, may be large
        "import os\nfor _ in range(99):\n    os.close(os.open('a', os.O_CREAT))\nopen('a', 'w').write('x' * 10 ** 6)"
    )
    result = sandbox.run(again)
    assert result.status == "ok", result


def test_system_calls_of_32_bit_programs(plain: Sandbox) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86_64 alone has a second entrance")
    program = (  # mov eax, 20 (getpid); int 0x80; ret
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"
        "print('OUT', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
    )
    result = plain.run(program)
    assert (result.status, result.stdout) == ("killed", ""), result


def test_a_daemon_does_not_outlive(sandbox: Sandbox) -> None:
    assert_refused(sandbox.run(ATTEMPT + "attempt('fork', lambda: os.fork() or os.setsid() or os.fork())"))


def test_a_daemon_does_not_outlive_even_if_it_could_start() -> None:
    """The second line of defence: the jail kills whatever a program has left behind."""
    with Sandbox(LIMITS, accept_missing=list(REQUIRED), mechanisms=()) as sandbox:
        program = (
            "import os, time\n"
            "started, start = os.pipe()\n"
            "if not os.fork():\n"
            "    os.setsid()\n"
            "    if not os.fork(): print(os.getpid(), flush=True); os.write(start, b'x'); time.sleep(99)\n"
            "else: os.read(started, 1)"
        )
        result = sandbox.run(program)
        assert result.status == "ok", result
        assert gone(int(result.stdout))


# --- the sandbox itself ---


def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    if reason := missing_protection(MECHANISMS):
        pytest.skip(reason)
    text = (
        "import sys, subprocess, pathlib, time\nfrom distflow.sandbox.sandbox import *\n"
        "s = Sandbox(ProgramLimits(cpu_s=100, wall_s=100))\nr = s.start('while True: pass', ())\n"
        "jail = s._jail._process.pid\nout = pathlib.Path(sys.argv[1])\n"
        "children = pathlib.Path(f'/proc/{jail}/task/{jail}/children')\n"
        "while not children.read_text().split(): time.sleep(0.01)\n"
        "out.with_suffix('.new').write_text(f'{jail} {children.read_text()}'); out.with_suffix('.new').rename(out)\n"
        "time.sleep(100)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path / "pids")], env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 2
    assert not any(map(gone, pids))
    (folder,) = tmp_path.glob("distflow-jail-*")
    parent.kill()
    parent.wait()
    for pid in pids:
        wait_until(partial(gone, pid))
    wait_until(lambda: not folder.exists())


def test_a_jail_that_was_killed_is_replaced(plain: Sandbox) -> None:
    with Sandbox(LIMITS) as sandbox:
        sandbox._jail._process.kill()
        assert sandbox.run("print(1)").status == "killed"
        assert sandbox.run("print(1)").stdout == "1\n"
        timer = threading.Timer(0.2, sandbox._jail._process.kill)
        timer.start()
        assert sandbox.run("import time; time.sleep(100)").status == "killed"
        assert sandbox.run("print(2)").stdout == "2\n"


def test_a_program_can_be_stopped(plain: Sandbox) -> None:
    run = plain.start("import time; time.sleep(100)", ())
    began = time.monotonic()
    assert run.stop().reason == "it was stopped"
    assert time.monotonic() - began < LIMITS.wall_s
    run = plain.start("", ())
    time.sleep(0.2)
    run.stop()  # it has ended before
    assert plain.run("print(3)").stdout == "3\n"


@pytest.mark.parametrize(
    ("mechanisms", "missing"),
    [((), ["network", "files", "processes"]), (("seccomp",), ["files"]), (("landlock",), ["network", "processes"])],
)
def test_a_missing_protection_is_refused(mechanisms: tuple[str, ...], missing: list[str]) -> None:
    with pytest.raises(SandboxError) as e:
        Sandbox(mechanisms=mechanisms)
    assert REQUIRED[missing[0]][0] in str(e.value)
    if reason := missing_protection(MECHANISMS):
        pytest.skip(reason)
    assert e.value.missing == missing
    with Sandbox(mechanisms=mechanisms, accept_missing=missing) as sandbox:
        assert not Path(f"{sandbox._jail._folder}.probe").exists()
        assert not set(missing) & set(sandbox.protections)
        assert sandbox.run("print(1)").stdout == "1\n"


def test_the_report_names_every_protection() -> None:
    with pytest.raises(SandboxError, match="there is no protection 'netwrok'; known: network, files, processes"):
        Sandbox(accept_missing=["netwrok"])
    lines = list(report())
    names = [line.split()[0] for line in lines]
    assert [name for name in names if name != "note"] == [
        *REQUIRED,
        "disk",
        "threads",
        "overhead",
    ]  # note: no namespaces


def test_as_an_ordinary_user() -> None:
    """All protections work without being root."""
    if os.getuid():
        pytest.skip("all tests above ran as an ordinary user")
    base = Path(sys.base_prefix)
    closed = [p for p in (base, *base.parents, *Path(__file__).parents) if not p.stat().st_mode & 0o001]
    if closed:
        pytest.skip(f"an ordinary user may not enter {closed[0]}")
    command = [sys.executable, "-m", "distflow.sandbox"]
    done = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=True)
    assert "NO" not in done.stdout
