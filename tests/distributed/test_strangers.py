"""A run goes on, and is the same, while somebody who does not know its token connects to all that it listens to."""

import sys
import time
from pathlib import Path

import pytest

from distflow.liveness.heartbeat import read_record
from distributed.test_restart import finished, write_config
from strangers import TCP, UDP, UNIX, Strangers, listening_sockets
from warm_launch import Launch

STEPS, CONNECTIONS = 40, 10  # of each kind, to each socket


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_goes_on_among_strangers(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"nap_s": 0.1}, steps=STEPS, restarts=0))
    workers = tmp_path / "run" / "workers"

    def step() -> int:
        records = [read_record(workers, rank) for rank in range(2)]
        return min(record.step if record else -1 for record in records)

    launch.wait_until(lambda: step() >= 2)
    targets = listening_sockets([record.pid for rank in range(2) if (record := read_record(workers, rank))])
    assert all(len(names) >= 2 for names in targets.values()), targets  # every worker has one of each
    strangers = Strangers(targets)
    for _ in range(CONNECTIONS):
        strangers.connect()
    kinds = {*(f"tcp: {k}" for k in TCP), *(f"unix: {k}" for k in UNIX), *(f"udp: {k}" for k in UDP)}
    assert strangers.counts.keys() == kinds
    assert all(count >= 2 * CONNECTIONS for count in strangers.counts.values()), strangers.counts
    attacked = step()
    while not launch.has_ended:
        strangers.connect_again()
        time.sleep(0.1)
    strangers.close()
    assert launch.wait() == 0, launch.err
    assert launch.err == ""
    assert finished(tmp_path, STEPS)
    assert 0 <= attacked < STEPS - 2  # they were there for steps
