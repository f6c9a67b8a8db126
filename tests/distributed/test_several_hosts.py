"""Workers on several hosts find each other, and report one that is cut off; reports need no common folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.test_run import write_config
from hosts import Hosts, why_not
from limits import TimeLimit, wait_until

reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(reason is not None, reason=str(reason))]
LIMIT_S = 4.0


class Run:
    """`distflow run` as one worker on each host, as an operator that sets the standard variables starts it."""

    def __init__(self, hosts: Hosts, path: Path, words: Sequence[Sequence[str]] = (), **variables: str) -> None:
        self.logs = [path.parent / f"{h.name}.log" for h in hosts]
        self.processes: list[subprocess.Popen[Any]] = []
        for rank, host in enumerate(hosts):
            own = words[rank] if words else []
            command = [sys.executable, "-u", "-m", "distflow", "run", str(path), f"workers={len(hosts)}", *own]
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].name,
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
            } | variables
            with open(self.logs[rank], "wb") as log:
                self.processes.append(host.popen(command, environment, stdout=log, stderr=log))

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def wait_until(self, text: str, limit_s: float = 90) -> None:
        limit = TimeLimit(limit_s)
        while text not in self.log(0):
            assert limit.left() > 0, self.all_logs()
            assert self.processes[0].poll() is None, self.all_logs()
            time.sleep(0.05)

    def end(self, limit_s: float = 90) -> list[int]:
        """Waits for all; returns their exit codes."""
        try:
            wait_until(lambda: all(p.poll() is not None for p in self.processes), limit_s, self.all_logs)
            return [p.returncode for p in self.processes]
        finally:
            for p in self.processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)

    def all_logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.logs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[Hosts]:
    with Hosts(3, private=[folder / "run"]) as made:
        yield made


def config(folder: Path, run_dir: str = "run", **changes: Any) -> Path:
    return write_config(folder, run_dir=str(folder / run_dir), wait_limit_s=LIMIT_S, workers=3, **changes)


def test_a_run_on_several_hosts(hosts: Hosts, folder: Path) -> None:
    run = Run(hosts, config(folder, "shared"), DISTFLOW_INTERFACE="eth0")  # its checkpoint is written by all
    assert run.end() == [0, 0, 0], run.all_logs()
    where = "; ".join(f"{h.name} ({h.address}): rank {r}" for r, h in enumerate(hosts))
    assert f"distflow: 3 workers on 3 hosts: {where}\n" in run.log(0)
    steps = [json.loads(line) for line in (folder / "shared" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert not (folder / "shared" / "workers").exists()


def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts: Hosts, folder: Path) -> None:
    run = Run(hosts, config(folder, "shared", steps=100_000))
    run.wait_until("step 2/")
    hosts[2].cut()
    try:
        codes = run.end(LIMIT_S + 60)
    finally:
        hosts[2].mend()
    assert 0 not in codes
    reports = [r for r in range(3) if "who waits for whom" in run.log(r)]
    assert 2 in reports, run.all_logs()  # the one that is alone
    assert len(reports) == 2, run.all_logs()  # one of the others
    here = run.log(reports[0])
    assert re.search(r"^rank 2 (on host2 did not answer|has had no heartbeat for \d+ s: .* on host2$)", here, re.M), (
        here
    )
    there = run.log(2)
    for rank in (0, 1):
        assert re.search(
            rf"^rank {rank} (on host{rank} did not answer|has had no heartbeat .* on host{rank}$)", there, re.M
        )


@pytest.fixture
def lossy(hosts: Hosts) -> Iterator[Hosts]:
    yield hosts
    for host in hosts:
        host.lose_nothing()


def test_a_run_goes_on_without_udp(lossy: Hosts, folder: Path) -> None:
    """TCP carries its data and, when asked, its heartbeats."""
    run = Run(lossy, config(folder, "shared", steps=100_000))
    run.wait_until("step 2/")
    for host in lossy:
        host.lose([h for h in lossy if h is not host], "udp")
    for rank in range(3):
        while "it is asked by TCP now and then" not in run.log(rank):
            assert [p.poll() for p in run.processes] == [None] * 3, run.all_logs()
            time.sleep(0.1)
    time.sleep(3 * LIMIT_S)
    for p in run.processes:
        os.killpg(p.pid, signal.SIGTERM)
    run.end()
    assert "wait_limit_s" not in run.all_logs()


def test_a_link_that_is_cut_one_way_is_named_with_its_direction(lossy: Hosts, folder: Path) -> None:
    run = Run(lossy, config(folder, "shared", steps=100_000))
    run.wait_until("step 2/")
    lossy[0].lose([lossy[1]])
    assert 0 not in run.end(LIMIT_S + 60)
    assert re.search(
        r"^TCP from host0 to host1 is broken: \d+ bytes sent were never acknowledged, though heartbeats \(UDP\) from"
        r" host1 arrive: packets from host0 to host1 are lost$",
        run.all_logs(),
        re.M,
    ), run.all_logs()


def test_a_host_that_hears_nobody_accuses_nobody(lossy: Hosts, folder: Path) -> None:
    run = Run(lossy, config(folder, "shared", steps=100_000))
    run.wait_until("step 2/")
    for host in lossy[:2]:
        host.lose([lossy[2]])
    assert 0 not in run.end(LIMIT_S + 60)
    healthy = run.log(0) + run.log(1)
    assert re.search(r"packets (from host[01] )?to host2 are lost", healthy), run.all_logs()
    assert not re.search(r"^rank [01] (on host[01] did not answer|has had no heartbeat)", healthy, re.M), healthy
    assert re.search(r"^rank [01] .*(is gone|was stopped|its machine)", run.log(2), re.M) is None, run.log(2)


def test_different_configs_are_named_with_their_hosts(hosts: Hosts, folder: Path) -> None:
    run = Run(hosts, config(folder), [["seed=1"], ["seed=1"], ["seed=2"]])
    assert 0 not in run.end()
    different = r"different configs: ranks 0-1 \(on host0, host1\) have \w+, ranks 2 \(on host2\) have \w+"
    for rank in range(3):
        assert re.search(different, run.log(rank)), run.all_logs()


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_hosts_that_would_each_form_a_world_say_so(hosts: Hosts, folder: Path, master: str) -> None:
    run = Run(hosts, config(folder), MASTER_ADDR=master)
    assert 0 not in run.end(40)
    for rank in range(3):
        assert f"all are to meet at {master}, which is every host itself" in run.log(rank)


def test_a_host_that_is_down_is_reported(hosts: Hosts, folder: Path) -> None:
    run = Run(hosts, config(folder), MASTER_ADDR="10.77.0.99", DISTFLOW_START_LIMIT_S="3")
    assert 0 not in run.end(60)
    assert "waits for ranks 1-2 for 3 s" in run.log(0)
    for rank in (1, 2):
        unreachable = (
            rf"rank {rank} on host{rank} cannot join .*10.77.0.99:29500, .*, cannot be reached: (No route|no ans)"
        )
        assert re.search(unreachable, run.log(rank)), run.log(rank)


def test_a_worker_with_a_mistake_of_its_own_is_named_by_all(hosts: Hosts, folder: Path) -> None:
    run = Run(hosts, config(folder), [[], ["placement.ranks.last=7"], []])
    assert 0 not in run.end(60)
    assert "names ranks 7-7, but there are 3 workers" in run.log(1)
    told = "another worker could not start: rank 1 on host1: "
    assert told in run.log(0), run.log(0)
    assert told in run.log(2) or "lost the store at host0:29500" in run.log(2), run.log(2)  # if it came much later
