"""Hosts on one machine are apart as real ones are: names, processes, folders, links that can be cut and shaped."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import limits
from distributed.cluster import STEPS, curve, saved_step, wait_until, write_config
from hosts import Host, Hosts, why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 9), 2)"
FORK = """
import os, socket, sys
sys.path.insert(0, {tests!r})
from hosts import Hosts

def meet(rank, greeting):
    assert rank == int(os.environ["RANK"])
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(master) as server:
            return sorted(server.accept()[0].recv(100).decode() for _ in range(3))
    while True:
        try:
            with socket.create_connection(master) as peer:
                peer.sendall(f"{{greeting}} {{rank}} {{socket.gethostname()}}".encode())
            return os.environ["LOCAL_RANK"]
        except ConnectionRefusedError:
            pass

def fail(rank):
    if rank == 3:
        raise ValueError("no luck")
    import time
    time.sleep(1000)

def answer_late(rank):
    large = bytearray(100 << 20)  # such a worker takes a while to end
    if rank == 0:
        os.kill(os.getpid(), 9)
    return bytes(large[: 1 << 20])

with Hosts(2) as hosts:
    print(hosts.fork(2, meet, "rank"))
    try:
        hosts.fork(2, fail)
    except AssertionError as e:
        print(e)
    before = [host.pids() for host in hosts]
    for _ in range(5):
        try:
            hosts.fork(4, answer_late)
        except AssertionError as e:
            print(e, [set(host.pids()) - set(pids) for host, pids in zip(hosts, before)])
"""


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def hosts(private: Path) -> Iterator[Hosts]:
    with Hosts(3, rate="100mbit", private=[private]) as hosts:
        yield hosts


def reaches(sender: Host, receiver: Host) -> bool:
    """Whether a packet comes back: nobody listens, so a connection is refused at once, or takes too long."""
    done = sender.popen([sys.executable, "-c", CONNECT, receiver.name], stderr=subprocess.PIPE, text=True)
    _, err = done.communicate(timeout=20 * limits.load_factor())
    assert "refused" in err or "timed out" in err or "No route" in err, err
    return "refused" in err


def test_a_host_has_its_own_name_processes_and_folders(hosts: Hosts, private: Path) -> None:
    for host in hosts[:2]:
        host.run(["sh", "-c", f"hostname > {private}/name; echo $$ > /dev/shm/own"])
    for host in hosts[:2]:
        assert host.run(["cat", f"{private}/name"]).stdout.startswith(f"{host.name}\n")
        assert (host.folder(private) / "name").read_text() == f"{host.name}\n"
        assert int(host.run(["cat", "/dev/shm/own"]).stdout) < 100
    assert not os.path.exists("/dev/shm/own")
    assert not os.listdir(private)
    assert hosts[0].run(["pwd"]).stdout.strip() == os.getcwd()


def test_a_link_that_is_cut_and_mended(hosts: Hosts) -> None:
    assert reaches(hosts[0], hosts[1])
    hosts[1].cut()
    assert not reaches(hosts[0], hosts[1])
    assert reaches(hosts[0], hosts[2])
    hosts[1].mend()
    assert reaches(hosts[0], hosts[1])


def test_a_killed_host_takes_its_processes_along_and_can_be_started_again(hosts: Hosts) -> None:
    victim = hosts[2]
    process = victim.popen(["sleep", "1000"])
    detached = victim.popen(["sh", "-c", "setsid sleep 1000 &"])
    detached.wait()
    while not any(b"1000" in Path(f"/proc/{p}/cmdline").read_bytes() for p in victim.pids()):
        time.sleep(0.01)
    pids = victim.pids()
    victim.kill()
    assert process.wait(10 * limits.load_factor()) == -signal.SIGKILL
    assert not any(os.path.exists(f"/proc/{p}") for p in pids)
    assert not reaches(hosts[0], victim)
    victim.start()
    assert reaches(hosts[0], victim)


def test_frozen_processes_do_nothing_until_they_are_thawed(hosts: Hosts) -> None:
    with hosts[0].popen(
        ["sh", "-c", "echo; read line; echo $line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        hosts[0].freeze()
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        hosts[0].thaw()
        assert process.communicate(timeout=20 * limits.load_factor())[0] == b"hello\n"


def test_bytes_are_counted_on_the_link_they_crossed(hosts: Hosts) -> None:
    size = 1 << 20
    receive = f"import socket; s = socket.create_server(('', 8)); print(flush=True); c, _ = s.accept(); n = {size}\n"
    receive += "while n: n -= len(c.recv(n))"
    send = f"import socket; socket.create_connection(('{hosts[1].name}', 8)).sendall(bytes({size}))"
    before = [host.traffic() for host in hosts]
    with hosts[1].popen([sys.executable, "-c", receive], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        hosts[0].run([sys.executable, "-c", send])
        assert receiver.wait(20 * limits.load_factor()) == 0
    sent, received = zip(
        *([b - a for a, b in zip(x, host.traffic(), strict=True)] for x, host in zip(before, hosts, strict=True)),
        strict=True,
    )
    assert size < sent[0] < 1.2 * size
    assert size < received[1] < 1.2 * size
    assert max(sent[1:] + received[:1] + received[2:]) < 0.2 * size


def test_workers_are_forked_into_their_hosts(tmp_path: Path) -> None:
    """By a process of its own: this one may have threads."""
    program = tmp_path / "program.py"
    program.write_text(FORK.format(tests=str(Path(__file__).parent.parent)))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60 * limits.load_factor()
    )
    results, failure = done.stdout.split("\n", 1)
    assert results == "[['rank 1 host0', 'rank 2 host1', 'rank 3 host1'], '1', '0', '1']", done.stderr
    assert failure.startswith("rank 3 on host1: Traceback")
    assert "ValueError: no luck" in failure
    # A worker that is killed while others write their answers: none is left when `fork` returns.
    assert failure.splitlines()[-5:] == ["rank 0 on host0: ended with exit code -9 [set(), set()]"] * 5, done.stderr


def test_nothing_is_left_after_a_crash(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from hosts import Hosts\n"
        "with Hosts(1) as hosts:\n"
        "    hosts[0].popen(['sleep', '1000'])\n"
        "    print(hosts._pid, hosts[0]._pid, *hosts[0].pids(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, timeout=60 * limits.load_factor()
    )
    limits.wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in done.stdout.split()), 20)


def torchrun(hosts: Hosts, host: Host, folder: Path, name: str) -> "subprocess.Popen[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=4", "--nproc-per-node=1", "--max-restarts=3"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-id={name}", f"--rdzv-endpoint={hosts[0].address}:29400"]
    command = [*launcher, *meeting, "-m", "distflow", "run", "config.yaml", f"run_dir={name}"]
    # Without the first, PyTorch reuses the store of the attempt that has failed.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / f"{name}.{host.name}.log", "a") as log:
        return host.popen(command, env, cwd=str(folder), stdout=log, stderr=log)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_the_run_ends_with_the_undisturbed_curve(tmp_path: Path) -> None:
    """torchrun on four hosts restarts the workers, which wait for the host and resume once it is back."""
    write_config(tmp_path, wait_limit_s=20)
    with Hosts(4, rate="1gbit") as hosts:
        calm = [torchrun(hosts, host, tmp_path, "calm") for host in hosts]
        for host, process in zip(hosts, calm, strict=True):
            assert process.wait(400 * limits.load_factor()) == 0, (tmp_path / f"calm.{host.name}.log").read_text()

        logs = [tmp_path / f"cut.{host.name}.log" for host in hosts]
        agents = [torchrun(hosts, host, tmp_path, "cut") for host in hosts]
        wait_until(lambda: saved_step(tmp_path / "cut") >= 2, agents, logs[0])
        lost = hosts[3]
        lost.cut()
        # The worker that watches the lost one names its host; the others say who has, or which peer they lost.
        named = re.compile(rf"^rank \d has had no heartbeat for \d+ s: .* on {lost.name}$", re.M)
        reported = re.compile(r"^distflow: (?!\d workers on)", re.M)

        def all_have_reported() -> bool:
            texts = [log.read_text() for log in logs[:3]]
            return all(reported.search(text) for text in texts) and any(named.search(text) for text in texts)

        wait_until(all_have_reported, agents[:3], logs[0])
        lost.mend()
        limit = limits.TimeLimit(400)
        while any(agent.poll() is None for agent in agents):
            if agents[3].poll() not in (None, 0):  # the agent of the host has given up: start the host's part again
                agents[3] = torchrun(hosts, lost, tmp_path, "cut")
            assert limit.left() > 0, "\n".join(log.read_text() for log in logs)
            time.sleep(0.2)
        assert [agent.returncode for agent in agents] == [0] * 4, "\n".join(log.read_text() for log in logs)
    texts = [log.read_text() for log in logs]
    assert sum(text.count("4 workers on 4 hosts") for text in texts) == 2, texts  # one restart was enough
    assert sum(text.count("distflow: resumed from") for text in texts) == 1, texts
    assert curve(tmp_path / "cut") == curve(tmp_path / "calm")
    assert len(curve(tmp_path / "calm")) == STEPS
