"""Links and CPUs, by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulate
from distflow.comm.collectives import all_gather, all_gather_by_host, all_reduce
from distflow.plan.topology import Topology
from distflow.simulate import Hardware, load_hardware
from distflow.simulate.network import NetworkModel


def hardware(per: str = "worker", message_s: float = 0.0, cores: float = 1.0, cpu_per: str = "worker") -> Hardware:
    """A network of 100 bytes a second and a second of latency; ten times as fast within a host."""
    return load_hardware(
        "h100",
        network={"rate": 100.0, "latency_s": 1.0, "per": per},
        local={"rate": 1000.0, "latency_s": 0.1},
        cpu={"message_s": message_s, "byte_s": 0.0, "pack_rate": 50.0, "cores": cores, "per": cpu_per},
        efficiency={"network": 1.0},
    )


def exchange(network: NetworkModel, *flows: tuple[int, int, float], start: list[float] | None = None) -> list[float]:
    sender, receiver, size = (np.array(x) for x in zip(*flows, strict=True))
    begin = np.array(start if start else [0.0] * len(network.hosts))
    return network.exchange(sender, receiver, size.astype(float), begin).tolist()


def test_one_message_over_one_link() -> None:
    network = NetworkModel(hardware(), np.array([0, 1, 2]))
    assert exchange(network, (0, 1, 500)) == [6.0, 6.0, 0.0]  # 500 / 100 + 1; rank 2 has no part in it
    assert network.sent.tolist() == [500, 0, 0]
    assert network.received.tolist() == [0, 500, 0]
    assert network.messages.tolist() == [1, 0, 0]


def test_within_a_host_it_is_the_local_link() -> None:
    network = NetworkModel(hardware(), np.array([0, 0]))
    assert exchange(network, (0, 1, 500)) == [0.6, 0.6]
    assert network.sent.sum() == 0
    assert network.sent_locally.tolist() == [500, 0]


def test_a_message_waits_for_its_sender_and_its_receiver() -> None:
    network = NetworkModel(hardware(), np.array([0, 1]))
    assert exchange(network, (0, 1, 500), start=[0.0, 10.0]) == [16.0, 16.0]


def test_two_messages_share_the_link_of_their_sender() -> None:
    network = NetworkModel(hardware(), np.array([0, 1, 2]))
    assert exchange(network, (0, 1, 500), (0, 2, 300)) == [9.0, 9.0, 9.0]


def test_workers_of_a_host_share_its_link_if_it_has_only_one() -> None:
    flows = [(0, 2, 500), (1, 3, 300)]
    hosts = np.array([0, 0, 1, 1])
    assert exchange(NetworkModel(hardware(), hosts), *flows) == [6.0, 4.0, 6.0, 4.0]
    assert exchange(NetworkModel(hardware("host"), hosts), *flows) == [9.0, 9.0, 9.0, 9.0]


def test_a_link_is_idle_until_its_first_message_comes() -> None:
    network = NetworkModel(hardware(), np.array([0, 1, 2]))
    ends = exchange(network, (0, 1, 100), (0, 2, 100), start=[0.0, 0.0, 50.0])
    assert ends == [52.0, 3.0, 52.0]


@pytest.mark.parametrize(("per", "seconds"), [("worker", 2.0), ("host", 4.0), ("all", 8.0)])
def test_messages_cost_cpu_time_that_workers_may_share(per: str, seconds: float) -> None:
    network = NetworkModel(hardware(message_s=2.0, cpu_per=per), np.array([0, 0, 1, 1]))
    sender, receiver = np.array([0, 1]), np.array([2, 3])
    network.exchange(sender, receiver, np.array([1e-9, 1e-9]), np.zeros(4))
    assert network.cpu_s.tolist() == [2.0] * 4
    assert max(
        exchange(NetworkModel(hardware(message_s=2.0, cpu_per=per), np.array([0, 0, 1, 1])), (0, 2, 0), (1, 3, 0))
    ) == (pytest.approx(seconds))


def test_packing_comes_before_sending() -> None:
    network = NetworkModel(hardware(), np.array([0, 1]))
    end = network.exchange(np.array([0]), np.array([1]), np.array([500.0]), np.zeros(2), pack=True)
    assert end.tolist() == [16.0, 16.0]  # 500 / 50, then 500 / 100 + 1


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13])
def test_collectives_send_what_the_workers_own_code_sends(n: int) -> None:
    import torch

    ranks, data = tuple(range(n)), torch.zeros(6, dtype=torch.int32)
    for own, simulated, group in (
        (lambda r: all_gather(r, ranks, data), NetworkModel.all_gather, np.arange(n)[None]),
        (lambda r: all_reduce(r, ranks, data, torch.maximum), NetworkModel.all_reduce, np.arange(n)),
    ):
        traffic = simulate.simulate({r: own(r) for r in ranks})
        network = NetworkModel(hardware(), np.arange(n))
        simulated(network, group, 24, np.zeros(n))
        assert network.messages.tolist() == [traffic.messages[r] for r in ranks]
        assert network.sent.tolist() == [traffic.bytes[r] for r in ranks]


@pytest.mark.parametrize("per_host", [1, 2, 4, 8, 16])
def test_gathering_by_host_sends_what_the_workers_own_code_sends(per_host: int) -> None:
    import torch

    hosts, data = np.arange(16) // per_host, torch.zeros(6, dtype=torch.int32)
    topology = Topology(tuple(hosts.tolist()))
    traffic = simulate.simulate({r: all_gather_by_host(r, range(16), data, topology) for r in range(16)})
    network = NetworkModel(hardware(), hosts)
    network.all_gather_by_host(np.arange(16)[None], 24, np.zeros(16))
    assert network.messages.tolist() == [traffic.messages[r] for r in range(16)]
    assert (network.sent + network.sent_locally).tolist() == [traffic.bytes[r] for r in range(16)]


def test_an_all_gather_takes_log_n_rounds() -> None:
    network = NetworkModel(hardware(), np.arange(1000))
    end = network.all_gather(np.arange(1000)[None], 1.0, np.zeros(1000))
    assert network.messages.max() == math.ceil(math.log2(1000))
    assert end == pytest.approx(np.full(1000, 10 + 999 / 100))


def test_groups_gather_at_the_same_time() -> None:
    network = NetworkModel(hardware(), np.arange(12))
    end = network.all_gather_by_host(np.arange(12).reshape(3, 4), 100.0, np.zeros(12))
    assert network.messages.tolist() == [2] * 12
    assert end == pytest.approx(np.full(12, 2 + 300 / 100))


Flow = tuple[int, int, float]
_flows = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.floats(0, 1e4)).filter(lambda f: f[0] != f[1]),
    min_size=1,
    max_size=20,
    unique_by=lambda f: (f[0], f[1]),
)


@settings(deadline=None)
@given(_flows, st.sampled_from(["worker", "host"]), st.floats(0, 100))
def test_what_is_sent_is_received_and_later_starts_end_later(flows: list[Flow], per: str, delay: float) -> None:
    network = NetworkModel(hardware(per), np.arange(8) // 2)
    early = np.array(exchange(network, *flows))
    assert network.sent.sum() == pytest.approx(network.received.sum())
    assert network.sent.sum() + network.sent_locally.sum() == pytest.approx(sum(size for _, _, size in flows))
    late = np.array(exchange(NetworkModel(hardware(per), np.arange(8) // 2), *flows, start=[delay] * 8))
    assert late == pytest.approx(early + delay)
    more = [(s, r, size + 1) for s, r, size in flows]
    assert (np.array(exchange(NetworkModel(hardware(per), np.arange(8) // 2), *more)) >= early - 1e-9).all()
