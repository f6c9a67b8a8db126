"""Workers that meet: what they learn of each other, and what they say if somebody does not come."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distflow.cluster import interface, rendezvous
from distflow.cluster.interface import addresses, export_interface, is_loopback, own_address
from distflow.cluster.launch_env import LaunchEnv
from distflow.cluster.rendezvous import Rendezvous
from distflow.errors import ConfigError, DistflowError, PeerLostError

TIMEOUT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has an environment of its own, and little patience."""
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"DISTFLOW_START_LIMIT_S": "1"})
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.5)


@pytest.fixture
def env() -> LaunchEnv:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    return LaunchEnv(0, 3, 0, None, "127.0.0.1", port, True, "torchrun")


def meet(*envs: LaunchEnv, prepare: Callable[[Rendezvous], None] = lambda r: None) -> list[Any]:
    """Returns the rendezvous of each worker, or the error that it raised."""
    results: list[Any] = [None] * len(envs)

    def worker(i: int) -> None:
        try:
            meeting = Rendezvous(envs[i], TIMEOUT)
            results[i] = meeting
            prepare(meeting)
            meeting.wait_for_all()
        except DistflowError as e:
            results[i] = e

    limit = os.environ["DISTFLOW_START_LIMIT_S"]
    if {e.rank for e in envs} == set(range(envs[0].workers)):  # nobody is missed, however slow the machine is
        os.environ["DISTFLOW_START_LIMIT_S"] = "60"
    threads = [threading.Thread(target=worker, args=(i,)) for i in range(len(envs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    os.environ["DISTFLOW_START_LIMIT_S"] = limit
    return results


def ranks(env: LaunchEnv, *numbers: int) -> list[LaunchEnv]:
    return [replace(env, rank=r) for r in numbers]


def test_workers_learn_what_the_others_publish(env: LaunchEnv) -> None:
    meetings = meet(*ranks(env, 0, 1, 2), prepare=lambda r: r.publish("heartbeat", f"port of {r.rank}"))
    assert [m.lookup("heartbeat", (m.rank + 1) % 3) for m in meetings] == ["port of 1", "port of 2", "port of 0"]
    assert len({m.token for m in meetings}) == 1
    assert len(meetings[0].token) == 16
    assert {m.address for m in meetings} == {"127.0.0.1"}


def test_workers_of_one_host_meet_in_a_file(env: LaunchEnv, tmp_path: Path) -> None:
    """Nothing listens, so no other user can read the token, or remove what workers wait for."""
    local = replace(env, hosts_store=False, launcher="distflow", local_workers=3, store_file=str(tmp_path / "store"))
    meetings = meet(*ranks(local, 0, 1, 2), prepare=lambda r: r.publish("heartbeat", f"port of {r.rank}"))
    assert [m.lookup("heartbeat", (m.rank + 1) % 3) for m in meetings] == ["port of 1", "port of 2", "port of 0"]
    assert len({m.token for m in meetings}) == 1
    errors = meet(*ranks(replace(local, store_file=str(tmp_path / "other")), 0, 2))
    assert f"2 of 3 workers have joined at {tmp_path}/other, on" in str(errors[0])
    assert "start the missing ones" in str(errors[0])


def test_a_single_worker_needs_no_port() -> None:
    (meeting,) = meet(LaunchEnv(0, 1, 0, None, "localhost", 0, True, "torchrun"))
    assert meeting.token


def test_those_who_do_not_come_are_named(env: LaunchEnv) -> None:
    env = replace(env, host=socket.gethostname())
    first, second = meet(*ranks(env, 0, 1))
    assert isinstance(first, ConfigError)
    text = str(first)
    assert f"2 of 3 workers have joined at {env.host}:{env.port}, on {socket.gethostname()}; rank 0 on" in text
    assert "waits for ranks 2 for 1 s; start the missing ones, or raise DISTFLOW_START_LIMIT_S" in text
    assert isinstance(second, DistflowError)


def test_a_loopback_address_is_the_cause_if_nobody_comes(env: LaunchEnv) -> None:
    (first,) = meet(env)
    assert "1 of 3 workers have joined" in str(first)
    assert "127.0.0.1 is every host itself: set MASTER_ADDR on all hosts" in str(first)


@pytest.mark.parametrize("rank", [0, 1])
def test_several_hosts_do_not_meet_at_localhost(env: LaunchEnv, rank: int) -> None:
    (error,) = meet(replace(env, rank=rank, local_workers=1, host="localhost"))
    assert "1 of 3 workers are on this host, but all are to meet at localhost, which is every host itself" in str(error)
    assert "set MASTER_ADDR on all hosts" in str(error)


def test_a_port_that_is_taken_is_reported(env: LaunchEnv) -> None:
    with socket.create_server(("", env.port)):
        (error,) = meet(env)
    assert f"port {env.port}, where the workers are to meet, is taken: another run, or this one started twice" in str(
        error
    )
    assert "set MASTER_PORT to a free port on all hosts" in str(error)
    with socket.create_server(("", env.port)):
        (error,) = meet(replace(env, launcher="Slurm"))
    assert "set DISTFLOW_MASTER_PORT to a free port" in str(error)


def test_a_port_at_which_nobody_listens_is_reported(env: LaunchEnv) -> None:
    (error,) = meet(replace(env, rank=1))
    assert f"rank 1 on {socket.gethostname()} cannot join the other 2 workers: nothing listens at" in str(error)
    assert "set MASTER_ADDR on all hosts" in str(error)
    assert str(error).endswith("it has tried for 1 s")


def test_a_host_that_does_not_resolve_is_reported(env: LaunchEnv) -> None:
    (error,) = meet(replace(env, rank=1, host="no-such-host.invalid"))
    assert "the host of rank 0, 'no-such-host.invalid', does not resolve here" in str(error)


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"), (TimeoutError("timed out"), "no answer")],
)
def test_a_host_that_cannot_be_reached_is_reported(
    env: LaunchEnv, monkeypatch: pytest.MonkeyPatch, raised: OSError, reason: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(socket, "create_connection", refuse)
    (error,) = meet(replace(env, rank=1, host="10.255.0.1"))
    assert f"10.255.0.1:{env.port}, where rank 0 should be, cannot be reached: {reason}; check the network" in str(
        error
    )


def test_two_workers_with_the_same_rank_are_reported(env: LaunchEnv) -> None:
    first, *others = meet(*ranks(env, 0, 1, 1))
    (error,) = [o for o in others if isinstance(o, ConfigError) and "another worker has rank 1" in str(o)]
    assert f"on {socket.gethostname()} (pid {os.getpid()})" in str(error)
    assert "of 3 workers have joined" in str(error)
    assert "give each a RANK of its own" in str(error)
    assert "waits for ranks 2" in str(first)


def test_a_world_that_is_complete_is_not_joined(env: LaunchEnv) -> None:
    meetings = meet(*ranks(env, 0, 1, 2))
    (error,) = meet(replace(env, rank=2))
    assert "the 3 workers that meet at" in str(error)
    assert "are complete, and rank 2 is already on" in str(error)
    assert "this run was started twice, or another one uses the port" in str(error)
    assert all(isinstance(m, Rendezvous) for m in meetings)


def test_a_world_of_another_size_is_not_joined(env: LaunchEnv) -> None:
    first, second = meet(env, replace(env, rank=1, workers=4))
    errors = [str(e) for e in (first, second)]
    assert any("this worker is one of 4, but others" in e or "this worker is one of 3, but others" in e for e in errors)


def test_a_mistake_of_one_worker_is_told_to_those_who_wait(env: LaunchEnv) -> None:
    os.environ["DISTFLOW_START_LIMIT_S"] = "30"

    def prepare(meeting: Rendezvous) -> None:
        if meeting.rank == 2:
            meeting.fail("has no GPU")
            raise ConfigError("has no GPU")

    first, second, _ = meet(*ranks(env, 0, 1, 2), prepare=prepare)
    for error in (first, second):
        assert isinstance(error, PeerLostError)
        assert f"another worker could not start: rank 2 on {socket.gethostname()}: has no GPU" in str(error)


def test_a_store_that_is_gone_is_reported(env: LaunchEnv) -> None:
    os.environ["DISTFLOW_START_LIMIT_S"] = "30"
    first: list[Any] = [Rendezvous(env, TIMEOUT)]

    def end_when_the_other_waits() -> None:
        while not first[0].store.check(["joined"]):
            time.sleep(0.01)
        first.clear()

    threading.Thread(target=end_when_the_other_waits, daemon=True).start()
    (error,) = meet(replace(env, rank=1))
    assert isinstance(error, PeerLostError)
    assert "while it waited for the others: rank 0 has ended; its own report says why" in str(error)


def test_attempts_that_share_a_store_do_not_mix(env: LaunchEnv) -> None:
    meetings = meet(*ranks(env, 0, 1, 2))
    again = meet(*(replace(e, hosts_store=False, attempt="1") for e in ranks(env, 0, 1, 2)))
    assert {m.token for m in meetings} != {m.token for m in again}
    (error,) = meet(replace(env, rank=1, hosts_store=False, attempt="1"))
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in str(error)


def test_the_limit_is_a_number(env: LaunchEnv) -> None:
    os.environ["DISTFLOW_START_LIMIT_S"] = "soon"
    with pytest.raises(ConfigError, match="'soon', which is not a number of seconds"):
        Rendezvous(env, TIMEOUT)


def test_a_waiting_worker_says_so_before_the_limit(
    env: LaunchEnv, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_WARNING_S", 0.2)
    with caplog.at_level("WARNING", "distflow"):
        meet(replace(env, rank=1))
        meet(env)
    tries, waits = (r.getMessage() for r in caplog.records)
    assert tries.endswith("still trying")
    assert "1 of 3 workers have joined" in waits
    assert waits.endswith("waits for ranks 1-2")


NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def test_the_interface_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ("lo", "127.0.0.1"):
        os.environ[interface.INTERFACE] = chosen
        assert own_address("10.0.0.1", True) == "127.0.0.1"
    os.environ[interface.INTERFACE] = "lp"
    with pytest.raises(ConfigError, match=r"DISTFLOW_INTERFACE: \S+ has no interface 'lp' with an address"):
        own_address("10.0.0.1", True)
    os.environ[interface.INTERFACE] = "203.0.113.9"
    with pytest.raises(ConfigError, match=r"203.0.113.9 is no address of this host .*; set it on each host"):
        own_address("10.0.0.1", True)


def test_nccl_chooses_its_interface_unless_the_user_does() -> None:
    for chosen, expected in (("", None), ("lo", "lo")):
        os.environ[interface.INTERFACE] = chosen
        for name in NAMES:
            os.environ.pop(name, None)
        export_interface("127.0.0.1")
        assert [os.environ.get(name) for name in NAMES] == ["lo", expected]
    os.environ["NCCL_SOCKET_IFNAME"] = "ib0"
    export_interface("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_rank_0_does_not_publish_a_loopback_address_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where a host's own name is 127.0.1.1."""
    monkeypatch.setattr(interface, "address_towards", lambda master: "127.0.1.1")
    monkeypatch.setattr(interface, "addresses", lambda: {"eth0": "10.0.0.1", "lo": "127.0.0.1"})
    assert own_address("node-a", several_hosts=True) == "10.0.0.1"
    assert own_address("node-a", several_hosts=False) == "127.0.1.1"
    assert own_address("127.0.0.1", several_hosts=True) == "127.0.1.1"


def test_the_own_addresses_are_known() -> None:
    assert addresses()["lo"] == "127.0.0.1"
    assert list(addresses())[-1] == "lo"
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("node-a")
    assert own_address("127.0.0.1", False) == "127.0.0.1"
