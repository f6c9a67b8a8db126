"""The weight sync: every destination rank gets exactly its part, in few messages, and one copy comes to a host."""

import math
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.comm.collectives import SendReceive
from distflow.plan import Layout
from distflow.plan.topology import Topology
from distflow.weights import gather, sync, sync_group
from distflow.weights.shards import Shards, TensorSpec, overlap, size, slices
from distflow.weights.sync import WeightSync
from simulate import simulate
from weights.message_count import SPECS, count

WORLD = 12
BUSY = settings(max_examples=80, deadline=None)


@dataclass(frozen=True)
class Case:
    specs: tuple[TensorSpec, ...]
    source: Shards
    destination: Shards
    topology: Topology

    @property
    def ranks(self) -> set[int]:
        return {*self.source.layout.ranks, *self.destination.layout.ranks}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.lists(st.integers(0, WORLD - 1), min_size=1, max_size=WORLD, unique=True))
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4) if len(ranks) % t == 0]))
    return Layout(tuple(ranks), len(ranks) // tp, tp)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Parameters of any shape whose cut dimension can be cut; there may be fewer rows than shards."""
    source = draw(layouts())
    destination = draw(st.one_of(layouts(), st.just(source)))
    specs = []
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), max_size=3))
        dim = draw(st.sampled_from([None, *range(min(3, len(shape)))]))
        if dim is not None:
            shape[dim] = draw(st.integers(1, 4)) * math.lcm(source.tp, destination.tp)
        elif shape:
            shape[0] = draw(st.integers(1, 30))
        specs.append(TensorSpec(f"p{i}", tuple(shape), dim))
    shard = draw(st.sampled_from([n for n in range(1, source.dp + 1) if source.dp % n == 0]))
    hosts = draw(st.lists(st.integers(0, 3), min_size=WORLD, max_size=WORLD))
    # Of parameters that the source does not cut, the destination may want a block of rows per tensor-parallel rank.
    whole = [s for s in specs if s.tp_dim is None and s.shape]
    blocks = {
        s.name: draw(st.integers(-(-s.shape[0] // destination.tp), s.shape[0] + 3))
        for s in whole
        if draw(st.booleans())
    }
    return Case(tuple(specs), Shards(source, shard), Shards(destination, 1, blocks), Topology(tuple(hosts)))


def whole(specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    """Returns parameters in which every element is a different number."""
    ends = torch.tensor([math.prod(s.shape) for s in specs]).cumsum(0).tolist()
    return {
        s.name: torch.arange(e - math.prod(s.shape), e).float().view(s.shape) for s, e in zip(specs, ends, strict=True)
    }


class Looked(dict[str, Tensor]):
    """Counts how often each tensor is looked up."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.lookups: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Tensor:
        self.lookups[name] += 1
        return super().__getitem__(name)


class Run:
    """Runs a weight sync among all ranks in one process; records what each has, and what it sent to whom."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.full = case, whole(case.specs)
        self.sent: Counter[tuple[int, int]] = Counter()  # bytes
        self.largest = 0  # bytes that a rank packed or received at once
        self.held: dict[int, Looked] = {}
        self.filled: dict[int, dict[str, Tensor]] = {}
        steps = {}
        for r in case.ranks:
            self.held[r] = Looked(self.parts(case.source, r))
            self.filled[r] = {
                name: torch.full_like(part, math.nan, dtype=dtype)
                for name, part in self.parts(case.destination, r).items()
            }
            transfer = WeightSync(case.specs, case.source, case.destination, r, dtype, case.topology)
            steps[r] = self.watched(r, transfer, self.filled[r])
        self.traffic = simulate(steps)

    def parts(self, shards: Shards, rank: int) -> dict[str, Tensor]:
        if shards.layout.replica_of(rank) is None:
            return {}
        return {s.name: self.full[s.name][slices(shards.box(s, rank))].clone() for s in self.case.specs}

    def watched(
        self, rank: int, transfer: WeightSync, filled: dict[str, Tensor]
    ) -> Generator[SendReceive, Tensor, None]:
        for wish in transfer.run(self.held[rank], filled):
            received = sum(end - start for start, end in wish.receive.values())
            self.largest = max(self.largest, wish.size, received)
            for peer, (start, end) in wish.send.items():
                self.sent[rank, peer] += end - start
            yield wish

    def into_host(self, host: int) -> int:
        hosts = self.case.topology.hosts
        return sum(n for (a, b), n in self.sent.items() if hosts[a] != host and hosts[b] == host)

    def check(self) -> None:
        for rank in self.case.destination.layout.ranks:
            for name, part in self.parts(self.case.destination, rank).items():
                assert torch.equal(self.filled[rank][name], part.to(self.filled[rank][name].dtype)), (rank, name)


def tp_pairs(specs: tuple[TensorSpec, ...], shard: int, source: Layout, destination: Layout, hosts: int = 1) -> Case:
    world = max(*source.ranks, *destination.ranks) + 1
    topology = Topology(tuple(r * hosts // world for r in range(world)))
    return Case(specs, Shards(source, shard), Shards(destination, 1), topology)


@BUSY
@given(cases(), st.sampled_from([1, 100, 1 << 26]), st.sampled_from([0, 2, 16]))
@example(
    tp_pairs((TensorSpec("p", (2, 3)),), 4, Layout((0, 1, 2, 3), 4), Layout((0, 1, 2, 3), 4)), 1, 16
)  # two hold nothing
@example(tp_pairs((TensorSpec("p", (6, 4), 1),), 2, Layout((0, 1, 2, 3), 2, 2), Layout((4, 5), 1, 2)), 1, 16)
@example(tp_pairs((TensorSpec("p", (8,), 0),), 2, Layout((3, 2, 1, 0), 2, 2), Layout((0, 1, 2, 3), 1, 4)), 1, 16)
@example(tp_pairs((TensorSpec("p", (12,), 0),), 1, Layout((0, 1, 2), 1, 3), Layout((0, 1), 1, 2)), 1, 16)
@example(tp_pairs((TensorSpec("p", (2, 12), 1),), 1, Layout((0, 1, 2), 1, 3), Layout((0, 1), 1, 2)), 1, 16)
def test_every_destination_rank_gets_exactly_its_part(case: Case, bucket: int, fan_in: int) -> None:
    direct = patch.object(sync_group, "FAN_IN", fan_in)  # 0: never
    with direct, patch.object(sync, "_BUCKET", bucket), patch.object(gather, "FAN_IN", max(2, fan_in)):
        done = Run(case)
    done.check()
    for rank in case.source.layout.ranks:
        assert set(done.held[rank].lookups.values()) <= {1}
        for name, part in done.parts(case.source, rank).items():
            assert torch.equal(done.held[rank][name], part)  # what was given is still there


@BUSY
@given(cases())
def test_each_piece_comes_to_a_host_once(case: Case) -> None:
    """No more bytes than one copy per dp group come to a host; pieces are padded to whole chunks of rows."""
    done = Run(case)
    hosts, tp = case.topology.hosts, case.destination.layout.tp
    for host in set(hosts):
        tp_ranks = {i % tp for i, r in enumerate(case.destination.layout.ranks) if hosts[r] == host}
        replicas = {
            WeightSync((), case.source, case.destination, r, torch.float32, case.topology).group.sources[0]
            for r in case.destination.layout.ranks
            if hosts[r] == host
        }
        copies = sum(padded(case, spec, t) for spec in case.specs for t in tp_ranks)
        assert done.into_host(host) <= 4 * copies * len(replicas)
    assert not any(a == b for a, b in done.sent)


def padded(case: Case, spec: TensorSpec, t: int) -> int:
    """Returns the elements of all pieces of a parameter for a dp group, each padded to a whole chunk."""
    source, destination = case.source, case.destination
    wanted = destination.box(spec, destination.layout.ranks[t])
    replicas = source.layout.replicas[: source.shard]
    overlaps = [overlap(wanted, source.box(spec, rank)) for replica in replicas for rank in replica]
    pieces = [p for p in overlaps if p is not None]
    widths = [size(p) // max(1, p[0][1] - p[0][0]) if spec.shape else 1 for p in pieces]
    rows = spec.shape[0] if spec.shape else 1
    chunk = -(-(rows // source.layout.tp if spec.tp_dim == 0 else rows) // source.shard)
    senders = len(widths) if spec.tp_dim is not None else len({p[:1] for p in pieces})
    return senders * chunk * max(widths, default=0)


@BUSY
@given(cases())
def test_weights_are_sent_in_the_dtype_they_are_used_in(case: Case) -> None:
    half, full = Run(case, torch.bfloat16), Run(case)
    half.check()
    assert {pair: 2 * n for pair, n in half.sent.items()} == full.sent


def across(n: int, tp: int, shard: int, per_host: int = 8) -> Case:
    """Trains with dp n, generates with dp n / tp × tp, on the same ranks."""
    ranks = tuple(range(n))
    specs = TensorSpec("a", (2 * n, 8), 0), TensorSpec("b", (2 * n, 8), 1), TensorSpec("c", (2 * n, 2))
    topology = Topology(tuple(r // per_host for r in ranks))
    return Case(specs, Shards(Layout(ranks, n), shard), Shards(Layout(ranks, n // tp, tp), 1), topology)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("n", [32, 256])
def test_messages_grow_as_log_n_and_links_carry_one_copy(n: int, tp: int) -> None:
    done = Run(across(n, tp, n))
    done.check()
    buckets = 3  # cut along the rows, beside them, not at all
    assert max(done.traffic.messages.values()) <= buckets * (math.log2(n) + tp)
    one_copy = 4 * (2 * n * 8 + 2 * n * 8 + tp * 2 * n * 2)  # of every tp rank
    assert {done.into_host(h) for h in range(n // 8)} == {one_copy * (n - 8) // n}


def test_many_source_ranks_send_to_few_over_a_tree() -> None:
    n = 600
    source, destination = Layout(tuple(range(n)), n), Layout((n, n + 1), 1, 2)
    case = tp_pairs((TensorSpec("a", (n, 4), 1),), n, source, destination, hosts=75)
    done = Run(case)
    done.check()
    into = Counter(b for _, b in done.sent)
    assert max(into.values()) <= 2 * sync_group.FAN_IN + 2 * (sync_group.FAN_IN - 1)


def test_one_source_rank_is_no_bottleneck_for_many() -> None:
    n = 256
    done = Run(tp_pairs((TensorSpec("a", (n, 4)),), 1, Layout((0,), 1), Layout(tuple(range(n)), n), hosts=32))
    done.check()
    assert max(done.traffic.messages.values()) <= math.log2(n) + sync_group.FAN_IN


def test_with_hybrid_sharding_the_cost_does_not_depend_on_the_number_of_ranks() -> None:
    most = {}
    for n in (16, 128):
        done = Run(across(n, 2, 8))
        done.check()
        assert not any(done.into_host(h) for h in range(n // 8))  # each host has a replica
        most[n] = max(done.traffic.messages.values())
    assert most[16] == most[128]


def test_nothing_is_sent_where_every_rank_has_it_all() -> None:
    layout = Layout((0, 1), 1, 2)
    specs = TensorSpec("a", (4, 2), 0), TensorSpec("b", (3,)), TensorSpec("c", ())
    assert not Run(Case(specs, Shards(layout, 1), Shards(layout, 1), Topology.single(2))).sent


def test_replicas_share_the_sending() -> None:
    """Norms, which tensor parallelism does not cut, come from different members of a replica."""
    specs = tuple(TensorSpec(f"norm{i}", (8,)) for i in range(8))
    with patch.object(sync, "_BUCKET", 1):
        done = Run(tp_pairs(specs, 1, Layout((0, 1, 2, 3), 1, 4), Layout((4, 5, 6, 7), 4)))
    done.check()
    assert [sum(n for (a, _), n in done.sent.items() if a == r) for r in range(4)] == [4 * 2 * 32] * 4


def test_large_models_are_sent_in_several_buckets() -> None:
    specs = tuple(TensorSpec(f"p{i}", (4, 4)) for i in range(6))
    case = tp_pairs(specs, 2, Layout((0, 1), 2), Layout((2,), 1))
    assert Run(case).traffic.messages == {0: 1, 1: 1}
    with patch.object(sync, "_BUCKET", 256):  # bytes: two of them in each half
        assert Run(case).traffic.messages == {0: 3, 1: 3}


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("destination", [Layout((2, 3), 2), Layout((2, 3), 1, 2)], ids=["dp2", "tp2"])
def test_no_message_is_larger_than_half_a_bucket(destination: Layout, hosts: int) -> None:
    """Parameters that are larger go in several."""
    specs = (
        TensorSpec("large", (64, 32)),
        TensorSpec("cut", (64, 32), 0),
        TensorSpec("across", (64, 32), 1),
        TensorSpec("small", (4,)),
    )
    case = tp_pairs(specs, 2, Layout((0, 1), 2), destination, hosts)
    with patch.object(sync, "_BUCKET", 2048):
        done = Run(case)
    done.check()
    assert 256 <= done.largest <= 1024  # bytes


def test_ranks_of_one_host_pass_nothing_on() -> None:
    done = Run(tp_pairs((TensorSpec("a", (12, 4)),), 3, Layout((0, 1, 2), 3), Layout((2, 3, 4), 3)))
    done.check()
    piece = 4 * 4 * 4
    assert done.sent == {(a, b): piece for a in (0, 1, 2) for b in (2, 3, 4) if a != b}


def test_on_devices_large_models_need_few_messages() -> None:
    assert count(SPECS["0.5B"], 8, 1)["messages"] < 200
    assert count(SPECS["7B"], 8, 1)["messages"] < 1_500
    assert count(SPECS["7B"], 8, 2)["messages"] < 1_500
    assert count(SPECS["7B"], 128, 1, rank=5)["messages"] < 6_000
    assert count(SPECS["72B"], 64, 4)["messages"] < 16_000
