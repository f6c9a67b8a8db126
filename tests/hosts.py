"""Hosts on one machine: network namespaces on a bridge, each with its own name, processes and shaped link.

    with Hosts(4, rate="1gbit") as hosts:
        server = hosts[0].popen(["python3", "-m", "http.server"])
        results = hosts.fork(8, worker)  # 32 processes: worker(rank) on each

Nothing is made outside the namespaces, and each of them lives as long as one process that dies with this one: they are
gone after a crash as well. Needs root, iproute2 and util-linux; `why_not()` says what is missing.
"""

import ctypes
import gc
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from limits import TimeLimit, load_factor, wait_until

NETWORK = "10.77.{}.{}"  # each bridge is a network of its own: all may have the same addresses
PORT = 29500  # MASTER_PORT of forked workers: nothing else runs on a new host
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
QUEUE_MS, SENDERS = 50, 8  # what a shaped link queues, and how many may send to it at once before it drops packets
FAILED = 3  # exit code of a worker that has said why
NAMESPACES = 0x20000 | 0x4000000 | 0x20000000 | 0x40000000  # CLONE_NEWNS, NEWUTS, NEWPID, NEWNET


def why_not() -> str | None:
    """Returns the reason why hosts cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    attempt = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return attempt.stderr.decode().strip() or None


class Host:
    """One network namespace with its own host name and processes. Made by `Hosts`, and up until it is killed."""

    def __init__(self, index: int, hosts: "Hosts") -> None:
        self.index, self.name = index, f"host{index}"
        self.address = NETWORK.format(index // 250, index % 250 + 1)
        self._hosts = hosts
        self._port = f"port{index}"  # where its cable ends in the switch
        self._holder: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of its first process

    def start(self) -> None:
        """Starts it, also again after `kill`: without processes, with the same name and address."""
        assert self._holder is None, f"{self.name} is up"
        self._holder, self._pid = _hold("--net", "--uts", "--mount", "--pid", "--mount-proc")
        hosts = self._hosts
        # The switch's end is made in the switch's namespace; `netns` is the pid of a process of the host.
        hosts._switch(
            f"ip link add {self._port} type veth peer name eth0 netns {self._pid}",
            f"ip link set {self._port} master switch up",
        )
        mounts = [
            "mount -t sysfs sysfs /sys",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {hosts._names} /etc/hosts",
        ]
        for folder in hosts._private:
            own = self.folder(folder)
            for path in (own, Path(folder)):
                path.mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {own} {folder}")
        self._sh(
            f"hostname {self.name}",
            *mounts,
            "ip link set lo up",
            f"ip address add {self.address}/16 dev eth0",
            f"ip link set eth0 address 02:00:00:00:00:{self.index:02x} up",  # peers remember it over a restart
        )
        self.shape(hosts.rate)

    def folder(self, private: str | Path) -> Path:
        """Returns where the machine itself sees what the host sees as this private folder."""
        return self._hosts._folder / self.name / str(private).lstrip("/")

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Starts a command there, `env` added to the environment. Signal it with `os.killpg(process.pid, …)`."""
        environment: Any = os.environ | dict(env or {})
        options.setdefault("start_new_session", True)
        folder = os.path.abspath(options.pop("cwd", None) or ".")
        return subprocess.Popen(
            [*self._enter("--mount", "--pid"), f"--wdns={folder}", *command], env=environment, **options
        )

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end; it must succeed."""
        process = self.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout_s * load_factor())
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{self.name}: {' '.join(command)}: exit code {process.returncode}\n{out}{err}"
        return subprocess.CompletedProcess(command, 0, out, err)

    def cut(self) -> None:
        """Takes its link down: packets are lost, nobody is told."""
        self._hosts._switch(f"ip link set {self._port} down")

    def mend(self) -> None:
        """Takes its link up again."""
        self._hosts._switch(f"ip link set {self._port} up")

    def lose(self, to: "Sequence[Host]", protocol: str = "") -> None:
        """Loses what it sends to these hosts from now on, or of that what is `udp`, and is not told: one way only."""
        gone = NETWORK.format(254, 254)  # packets go to a machine that is not there
        kind = f"ipproto {protocol} " if protocol else ""
        self._sh(
            f"ip neigh replace {gone} lladdr 02:00:00:00:fe:fe nud permanent dev eth0",
            f"ip route replace {NETWORK.format(0, 0)}/16 via {gone} dev eth0 onlink table 100",
            *(f"ip rule add pref 10 {kind}to {host.address} lookup 100" for host in to),
        )

    def lose_nothing(self) -> None:
        self._sh("while ip rule del pref 10 2>/dev/null; do :; done")

    def kill(self) -> None:
        """Ends it as a loss of power would: its peers get no goodbye. `start` starts it again."""
        if self._holder is None:
            return
        self.cut()
        self._end()
        self._hosts._switch(f"ip link del {self._port} 2>/dev/null || true")  # the kernel would do it a little later

    def shape(self, rate: str | None) -> None:
        """Limits what it sends and what it receives, each to this rate (`100mbit`); None: no limit."""
        for enter, device in ((self._sh, "eth0"), (self._hosts._switch, self._port)):
            enter(f"tc qdisc del dev {device} root 2>/dev/null || true")
            if rate is not None:
                enter(f"tc qdisc add dev {device} root tbf rate {rate} burst {_burst(rate)} latency {QUEUE_MS}ms")
        if rate is not None:
            # Windows that fit the link, as one sets them: of those for fast networks, few senders overrun its queue.
            window = (_burst(rate) + int(_bytes_per_s(rate) * QUEUE_MS / 1000)) // SENDERS
            self._sh(f"echo 4096 {window // 2} {window} > /proc/sys/net/ipv4/tcp_rmem || true")

    def freeze(self) -> None:
        """Stops all its processes (SIGSTOP) until `thaw`; the link and the kernel's connections stay."""
        for pid in reversed(self.pids()):
            os.kill(pid, signal.SIGSTOP)
            while not _is_stopped(pid):  # an `nsenter` that saw its command stop would stop once more after `thaw`
                time.sleep(0.001)

    def thaw(self) -> None:
        for pid in self.pids():  # before the `nsenter` that waits for them, which would stop again
            os.kill(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """Returns its processes, as the machine itself numbers them; last the `nsenter`s of `popen`."""
        assert self._holder is not None, f"{self.name} is down"
        network, processes = (os.readlink(f"/proc/{self._pid}/ns/{kind}") for kind in ("net", "pid"))
        inside: list[int] = []
        outside: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/net") == network:
                    own = os.readlink(entry / "ns/pid") == processes
                    (inside if own else outside).append(int(entry.name))
            except OSError:
                continue  # it has ended
        return [pid for pid in inside + outside if pid not in (self._pid, self._holder.pid)]

    def traffic(self) -> tuple[int, int]:
        """Returns the bytes that it has sent and received since it was started, headers of all layers included."""
        received_by_switch, sent_by_switch = self._hosts._counters()[self._port]
        return received_by_switch, sent_by_switch

    def _end(self) -> None:
        if self._holder is not None:
            os.kill(self._pid, signal.SIGKILL)  # the first process of a PID namespace: the kernel kills all others
            self._holder.wait()
            self._holder = None

    def _enter(self, *namespaces: str) -> list[str]:
        assert self._holder is not None, f"{self.name} is down; start() it"
        return ["nsenter", f"--target={self._pid}", "--net", "--uts", *namespaces]

    def _sh(self, *lines: str) -> None:
        _check([*self._enter("--mount"), "sh", "-ec", "\n".join(lines)])


class Hosts(Sequence[Host]):
    """`n` hosts on one switch. `rate`: of every link, each way. `private`: folders that no two hosts share."""

    def __init__(self, n: int, rate: str | None = None, private: Sequence[str | Path] = ()) -> None:
        if reason := why_not():
            raise RuntimeError(f"no hosts on this machine: {reason}")
        self.rate, self._private = rate, private
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._names = self._folder / "names"
        self._all = [Host(i, self) for i in range(n)]

    def __enter__(self) -> "Hosts":
        self._names.write_text("".join(f"{h.address} {h.name}\n" for h in self._all) + "127.0.0.1 localhost\n")
        self._holder, self._pid = _hold("--net", "--pid")
        try:
            self._switch("ip link add switch type bridge", "ip link set switch up")
            for host in self._all:
                host.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._all:
            host._end()
        self._holder.kill()
        self._holder.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all)

    def fork(self, per_host: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Runs fn(rank, *args) in `per_host` forks of this process on every host and returns the results by rank.

        Import what the workers need before: they share its memory. But start no thread and run no torch operation, and
        have OMP_NUM_THREADS=1 in the environment: a fork of a process with threads may hang. The variables of a
        launcher are set (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
        gc.collect()
        gc.freeze()  # else the workers' garbage collection would copy the shared pages
        _raise_open_files()
        with tempfile.TemporaryDirectory() as folder:
            answers = os.open(folder, os.O_RDONLY)  # hosts may see another folder there
            leaders: dict[int, Host] = {}
            try:
                for host in self._all:
                    if (pid := os.fork()) == 0:
                        _lead(host, per_host, len(self) * per_host, self._all[0].address, answers, fn, args)
                    os.setpgid(pid, pid)  # the process group is what ends all its workers
                    leaders[pid] = host
                _wait(leaders, timeout_s)
            finally:
                os.close(answers)
                _end_groups(leaders)  # before the folder goes: a worker may be writing its answer
            results = {int(path.name): pickle.loads(path.read_bytes()) for path in Path(folder).glob("*[0-9]")}
        for rank, (ok, value) in sorted(results.items()):
            assert ok, f"rank {rank} on {self._all[rank // per_host].name}: {value}"
        return [results[rank][1] for rank in range(len(self) * per_host)]

    def _switch(self, *lines: str) -> None:
        _check(["nsenter", f"--target={self._pid}", "--net", "sh", "-ec", "\n".join(lines)])

    def _counters(self) -> dict[str, tuple[int, int]]:
        """Returns, for each port of the switch, the bytes received and sent."""
        lines = Path(f"/proc/{self._pid}/net/dev").read_text().splitlines()[2:]
        columns = [line.replace(":", " ").split() for line in lines]
        return {name: (int(values[0]), int(values[8])) for name, *values in columns}


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"


def _hold(*namespaces: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process that holds new namespaces, and returns it with the pid of the first process in them, which reaps
    orphans. All die with this process."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--fork", "--kill-child"]
    loop = "echo; while :; do sleep 86400; done"
    holder = subprocess.Popen(
        [*command, "sh", "-c", loop], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"\n", f"unshare {' '.join(namespaces)} has failed"
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    holder.stdout.close()
    return holder, int(children[0])


def _check(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"


def _bytes_per_s(rate: str) -> float:
    match = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    assert match, f"rate: '{rate}'; write it as 500kbit, 100mbit or 1gbit"
    return float(match[1]) * UNITS[match[2]] / 8


def _burst(rate: str) -> int:
    """Returns the bytes that may be sent at once: 4 ms of the rate, at least two of the largest packets."""
    return max(2 << 16, int(_bytes_per_s(rate) * 0.004))


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _lead(
    host: Host, per_host: int, workers: int, master: str, answers: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Moves this fork to the host, forks the workers there, and ends with the first that fails. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)  # as the parent does: whoever comes first
        namespaces = os.pidfd_open(host._pid)
        if ctypes.CDLL(None, use_errno=True).setns(namespaces, NAMESPACES) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host.name}")
        os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
        os.environ |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(per_host)}
        ranks = {}
        for local in range(per_host):
            rank = host.index * per_host + local
            if (pid := os.fork()) == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local)}
                _work(rank, answers, fn, args)
            ranks[pid] = rank
        while ranks:
            pid, status = os.wait()
            if ended := os.waitstatus_to_exitcode(status):
                if ended != FAILED:
                    _answer(ranks[pid], answers, (False, f"ended with exit code {ended}"))
                break
            del ranks[pid]
        else:
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(rank: int, answers: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Runs one worker and writes its result into the open folder `answers`. Never returns."""
    code = FAILED
    try:
        _answer(rank, answers, (True, fn(rank, *args)))
        code = 0
    except BaseException:
        _answer(rank, answers, (False, traceback.format_exc()))
    finally:
        os._exit(code)  # a fork must not run the exit handlers of its parent


def _answer(rank: int, answers: int, answer: tuple[bool, Any]) -> None:
    part = f"{rank}.part"  # whoever is killed while it writes has said nothing
    with open(os.open(part, os.O_CREAT | os.O_WRONLY, dir_fd=answers), "wb") as f:
        pickle.dump(answer, f)
    os.rename(part, str(rank), src_dir_fd=answers, dst_dir_fd=answers)


def _end_groups(leaders: Mapping[int, Host]) -> None:
    """Kills the process groups of these leaders, and returns when no process of them is left."""
    for pid in leaders:
        os.killpg(pid, signal.SIGKILL)
    for pid in leaders:
        os.waitpid(pid, 0)
        wait_until(partial(_is_gone, pid))


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def _wait(leaders: Mapping[int, Host], timeout_s: float) -> None:
    """Waits until all have ended, or one has failed."""
    limit, left = TimeLimit(timeout_s), dict(leaders)
    while left:
        for pid in list(left):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                if ended.si_status != 0:
                    return
                del left[pid]
        assert limit.left() > 0, f"{', '.join(h.name for h in left.values())} took over {limit}"
        time.sleep(0.01)
