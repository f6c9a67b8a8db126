"""Simulated traffic is that of the workers' own routes and weight sync."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import simulate
from distflow.comm.domains import Domains
from distflow.comm.routes import contiguous_replicas, route
from distflow.flow import Flow, Node
from distflow.plan import Layout, Place, Placement, Plan, Workload, plan
from distflow.plan.topology import Topology
from distflow.simulate import Costs, load_hardware
from distflow.simulate import simulate as simulate_step
from distflow.simulate.network import NetworkModel
from distflow.simulate.traffic import new_replicas, traffic
from distflow.simulate.weight_sync import sync_weights
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync import WeightSync


def two_nodes(workers: int, first: Place, second: Place, samples: int, balance: str | None = None) -> Plan:
    nodes = (Node("a", writes=("x",)), Node("b", reads=("x",), balance=balance))
    sets = {"low": "0%-50%", "high": "50%-"}
    placement = Placement(workers, sets, nodes={"a": first, "b": second})
    return plan(Flow("two", (), nodes), placement, Workload(samples, 1, {"x": 1000}))


_places = st.sampled_from([Place(), Place(tp=2), Place(tp=4), Place("low"), Place("high"), Place("high", tp=2)])


@given(_places, _places, st.integers(1, 6), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([2, 64]))
def test_it_is_what_every_rank_would_send(
    a: Place, b: Place, per_worker: int, seed: int, balance: bool, most_replicas: int
) -> None:
    planned = two_nodes(8, a, b, 8 * per_worker, "x" if balance else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distflow.comm.domains.MAX_REPLICAS", most_replicas)
        domains = Domains(planned, planned.samples)
    for move in planned.moves:
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 100, planned.samples).astype(float)
        old = contiguous_replicas(planned.samples, move.src.layout.dp)
        new = new_replicas(domains.all(move), old, size, 1)
        assert np.bincount(new, minlength=move.dst.layout.dp).max() == math.ceil(planned.samples / move.dst.layout.dp)
        flows = traffic(move, old, new, size, 8)
        simulated = dict(
            zip(zip(flows.sender.tolist(), flows.receiver.tolist(), strict=True), flows.payload, strict=True)
        )
        kept = np.zeros(8)
        real: dict[tuple[int, int], float] = {}
        for r in range(8):
            own = route(r, move.src.layout, move.dst.layout, old, new)
            real |= {(r, to): size[slots].sum() for to, slots in own.send.items()}
            kept[r] = size[own.keep].sum()
        assert simulated == real
        assert flows.kept.tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Place("low"), Place("high")),
        (Place(), Place(tp=2)),
        (Place("low"), Place("high", tp=4)),
    ],
)
def test_bytes_are_those_that_the_plan_expects(a: Place, b: Place) -> None:
    planned = two_nodes(8, a, b, 32)
    result = simulate_step(planned, load_hardware("h100"), Costs())
    for move in planned.moves:
        assert result.task(move.name).bytes == move.expected_bytes


@pytest.mark.parametrize("shard", [8, 4, 2])
@pytest.mark.parametrize("per_host", [8, 4, 2])
@pytest.mark.parametrize(("dp", "tp"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_weight_sync_sends_what_the_workers_own_code_sends(
    shard: int, per_host: int, dp: int, tp: int, dim: int
) -> None:
    ranks = tuple(range(8))
    source, target, specs = Layout(ranks, 8), Layout(ranks, dp, tp), [TensorSpec("w", (64, 64), dim)]
    topology = Topology(tuple(r // per_host for r in ranks))

    def worker(rank: int) -> Any:
        shards = Shards(source, shard)
        held = {s.name: torch.zeros([b - a for a, b in shards.box(s, rank)]) for s in specs}
        filled = {s.name: torch.zeros([b - a for a, b in Shards(target, 1).box(s, rank)]) for s in specs}
        return WeightSync(specs, shards, Shards(target, 1), rank, torch.float32, topology).run(held, filled)

    real = simulate.simulate({r: worker(r) for r in ranks})
    network = NetworkModel(load_hardware("h100"), np.array(topology.hosts))
    _, sent = sync_weights(network, source, target, shard, 64 * 64 * 4, np.zeros(8), 1.0 - dim)
    assert sent == pytest.approx(sum(real.bytes.values()))
    assert network.messages.tolist() == [real.messages[r] for r in ranks]


@pytest.mark.parametrize("split", [False, True])
def test_one_copy_of_the_weights_crosses_to_each_host(split: bool) -> None:
    network = NetworkModel(load_hardware("h100"), np.arange(32) // 8)
    source = Layout(tuple(range(16, 32)) if split else tuple(range(32)), 16 if split else 32)
    target = Layout(tuple(range(16)) if split else tuple(range(32)), 8 if split else 16, 2)
    sync_weights(network, source, target, source.dp, 1e9, np.zeros(32))
    into = np.bincount(network.hosts, network.received)
    assert into.tolist() == pytest.approx([1e9, 1e9, 0, 0] if split else [0.75e9] * 4)
