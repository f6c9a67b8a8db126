import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import random_plan
from distflow.errors import PlacementError
from distflow.flow import Flow, Node
from distflow.plan import (
    Free,
    Layout,
    Load,
    Merge,
    Move,
    Partition,
    Place,
    Placement,
    Plan,
    Resample,
    RunNode,
    Split,
    SyncWeights,
    Workload,
    plan,
)
from distflow.plan.layout import contiguous_share

ROOT = Path(__file__).parents[2]
PLANS = [random_plan(random.Random(seed), workers=seed % 8 + 1) for seed in range(200)]


def chain_of(*ids: str, **last: Any) -> Flow:
    """data → first → second → …, each reading the one before; `last` are attributes of the last."""
    reads = ("prompt", *ids)
    nodes = [Node(i, reads=(reads[k],), writes=(i,), **(last if i == ids[-1] else {})) for k, i in enumerate(ids)]
    return Flow("chain", ("prompt",), tuple(nodes))


def planned(flow: Flow, workers: int = 4, prompts: int = 8, repeat: int = 2, **where: Any) -> Plan:
    rank_sets = {"left": "0-1", "right": "2-3"} if workers >= 4 else {}
    workload = Workload(prompts, repeat, dict.fromkeys(flow.writer, 100))
    return plan(flow, Placement(workers, rank_sets, **where), workload)


def same_place(p: Plan, *nodes: str) -> bool:
    return len({p.home[n] for n in nodes}) == 1


# ---- properties of every plan ----


def test_each_chain_is_a_subsequence_of_the_one_global_order() -> None:
    for p in PLANS:
        together = p.chains()
        assert sorted(r for ranks in together for r in ranks) == list(range(p.workers))
        for ranks, tasks in together.items():
            positions = [next(i for i, t in enumerate(p.tasks) if t is mine) for mine in tasks]
            assert positions == sorted(positions)
            assert all(p.chain(r) == tasks for r in ranks)


def test_every_task_is_in_the_chains_of_all_its_ranks_and_of_no_other() -> None:
    for p in PLANS:
        chains = [{id(t) for t in p.chain(r)} for r in range(p.workers)]
        for t in p.tasks:
            if isinstance(t, Move):
                assert set(t.ranks) == {*t.src.layout.ranks, *t.dst.layout.ranks}
            elif not isinstance(t, SyncWeights | Resample):
                assert t.ranks == t.partition.layout.ranks
            assert {r for r in range(p.workers) if id(t) in chains[r]} == set(t.ranks)


def test_no_exchange_can_deadlock() -> None:
    """Ranks walk their chains at any pace; a move happens when all its ranks have reached it."""
    for seed, p in enumerate(PLANS):
        rng = random.Random(seed)
        left = {r: list(p.chain(r)) for r in range(p.workers)}
        while any(left.values()):
            able = [r for r, c in left.items() if c and all(left[q][:1] == c[:1] for q in _partners(c[0]))]
            assert able, f"plan {seed}: all wait"
            r = rng.choice(able)
            for q in _partners(left[r][0]) or (r,):
                left[q].pop(0)


def test_one_worker_moves_nothing_to_itself() -> None:
    """All samples are in its one replica: there is nothing to balance, and every group is whole."""
    nodes = (
        Node("generate", reads=("prompt",), writes=("tokens",)),
        Node("keep", reads=("tokens",), writes=("kept",), whole_groups=True, dynamic_sampling=2),
        Node("update", reads=("tokens", "kept"), whole_groups=True, balance="tokens"),
    )
    assert planned(Flow("f", ("prompt",), nodes), workers=1).moves == ()
    for p in PLANS:
        replicas = [(t.src.layout, t.dst.layout) for t in p.moves if t.src.chunk is None]
        assert all(src.dp > 1 for src, dst in replicas if src == dst)


def _partners(task: object) -> tuple[int, ...]:
    return task.ranks if isinstance(task, Move) else ()


def test_every_reader_has_its_fields_and_every_field_is_freed_once_after_its_last_reader() -> None:
    for p in PLANS:
        held: set[tuple[str, str]] = set()
        freed: set[tuple[str, str]] = set()
        ran: set[str] = set()
        latest: Load | Move | RunNode | Resample | Split | Merge | None = None
        for t in p.tasks:
            match t:
                case Load():
                    held |= {(t.partition.id, f) for f in t.fields}
                case Move():
                    assert t.src is not t.dst
                    assert {(t.src.id, f) for f in t.fields} <= held
                    assert not {(t.dst.id, f) for f in t.fields} & held, "moved to where it is"
                    held |= {(t.dst.id, f) for f in t.fields}
                case RunNode():
                    n = p.flow.node(t.node)
                    assert t.partition is p.partition_of(n.id)
                    assert t.reads == n.reads
                    assert {(t.partition.id, f) for f in n.reads} <= held
                    assert n.dynamic_sampling or t.writes == tuple(f for f in n.writes if p.flow.readers[f]), (
                        "keeps what nobody reads"
                    )
                    assert ran.issuperset(p.flow.parents(n))
                    assert n.id not in ran
                    ran.add(n.id)
                    held |= {(t.partition.id, f) for f in t.writes}
                case Resample():
                    assert t.consumed() <= held
                    held -= t.consumed()
                    freed |= t.consumed()
                    held |= {(dst.id, f) for _, dst, fields in t.carried for f in fields}
                    latest = t
                    assert held == {(dst.id, f) for _, dst, fields in t.carried for f in fields}, "left behind"
                    continue
                case Free():
                    gone = {(t.partition.id, f) for f in t.fields}
                    assert latest is not None
                    assert gone <= held
                    assert gone <= {(q.id, f) for q, f in latest.touches()}, "freed later than it could be"
                    assert not gone & freed, "freed twice"
                    held -= gone
                    freed |= gone
            if not isinstance(t, Free | SyncWeights):
                assert not freed & {(q.id, f) for q, f in t.touches()}, "used after it was freed"
                latest = t
        assert ran == {n.id for n in p.flow.nodes}
        assert not held, "never freed"


def test_only_fields_that_are_read_are_moved() -> None:
    for p in PLANS:
        for m in p.moves:
            assert m.fields
            readers = [n for n in p.flow.nodes if p.partition_of(n.id) is m.dst]
            assert all(any(f in n.reads for n in readers) for f in m.fields)


def test_an_edge_is_local_if_and_only_if_its_ends_share_a_partition() -> None:
    for p in PLANS:
        arrived = {(m.dst.id, f) for m in p.moves for f in m.fields}
        for e in p.edges:
            assert e.moves or p.home[e.writer].rstrip("+") == p.home[e.reader].rstrip("+")
            assert all(((p.home[e.reader], f) in arrived) == e.moves for f in e.fields)


def test_the_requirements_of_a_node_are_met() -> None:
    for p in PLANS:
        for n in p.flow.nodes:
            place = p.partition_of(n.id)
            alone = place.layout.dp == 1
            assert place.whole_groups or not n.whole_groups or alone
            assert alone or not n.whole_batch
            assert n.balance is None or place.balance == n.balance or alone
            if n.type == "inference" and not n.whole_groups:
                assert place.largest_share(p.samples, p.repeat) == -(-p.samples // place.layout.dp)


def test_some_plan_has_a_node_that_sees_the_whole_batch() -> None:
    assert any(n.whole_batch and len(p.partition_of(n.id).layout.ranks) > 1 for p in PLANS for n in p.flow.nodes)


def test_samples_are_assigned_once_by_the_move_that_knows_the_lengths() -> None:
    for p in PLANS:
        for place in p.partitions:
            arrivals = [m for m in p.moves if m.dst is place]
            assert [m.assigns for m in arrivals[1:]] == [False] * len(arrivals[1:])
            if place.balance:
                assert arrivals[0].assigns
                assert place.balance in arrivals[0].fields


# ---- partitions and moves ----


def test_nodes_of_one_layout_move_nothing() -> None:
    p = planned(chain_of("a", "b", "c"))
    assert p.moves == ()
    assert same_place(p, "data", "a", "b", "c")
    assert not any(e.moves for e in p.edges)


def test_readers_in_one_place_share_one_move() -> None:
    nodes = (
        Node("generate", reads=("prompt",), writes=("response", "length")),
        Node("judge", reads=("response",), writes=("score",)),
        Node("measure", reads=("response", "length"), writes=()),
    )
    right = Place("right")
    p = planned(Flow("f", ("prompt",), nodes), default=Place("left"), nodes={"judge": right, "measure": right})
    assert same_place(p, "judge", "measure")
    assert [m.fields for m in p.moves] == [("response", "length")]


def test_a_field_nobody_reads_is_neither_kept_nor_moved() -> None:
    nodes = (Node("a", reads=("x",), writes=("y", "unread")), Node("b", reads=("y",)))
    p = planned(Flow("f", ("x", "unasked"), nodes), default=Place("left"), nodes={"b": Place("right")})
    assert [m.fields for m in p.moves] == [("y",)]
    assert p.tasks[0] == Load(p.partition_of("data"), ("x",))
    assert next(t for t in p.tasks if isinstance(t, RunNode)).writes == ("y",)


def test_a_move_does_not_wait_for_a_parallel_branch() -> None:
    nodes = (
        Node("slow", reads=("x",), writes=("s",)),
        Node("quick", reads=("x",), writes=("q",)),
        Node("join", reads=("q", "s"), writes=()),
    )
    right = Place("right")
    p = planned(Flow("f", ("x",), nodes), default=Place("left"), nodes={"quick": right, "join": right})
    assert [m.fields for m in p.moves] == [("x",), ("s",)]


def test_balance_makes_a_partition_of_its_own() -> None:
    flow = chain_of("a", "b", balance="a")
    p = planned(flow)
    assert p.partition_of("a").layout == p.partition_of("b").layout
    assert not same_place(p, "a", "b")
    assert p.partition_of("b").balance == "a"
    assert [(m.fields, m.assigns) for m in p.moves] == [(("a",), True)]


def test_nodes_balanced_by_one_field_share_a_partition_and_later_ones_stay() -> None:
    nodes = (
        Node("a", reads=("prompt",), writes=("a",)),
        Node("b", reads=("a",), writes=("b",), balance="a"),
        Node("c", reads=("a", "b"), writes=("c",), balance="a"),
        Node("d", reads=("c",)),
    )
    p = planned(Flow("f", ("prompt",), nodes))
    assert same_place(p, "b", "c", "d")
    assert len(p.moves) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_groups_are_kept_together_early_for_nodes_that_need_them_later(whole: bool) -> None:
    flow = chain_of("a", "b", "c", whole_groups=whole)
    p = planned(flow, nodes={"a": Place("left", tp=2), "b": Place("right"), "c": Place("right")})
    assert same_place(p, "b", "c")
    assert p.partition_of("b").whole_groups == whole
    assert len(p.moves) == 1


@pytest.mark.parametrize(
    ("src", "dst", "copies"),
    [
        (Place("left", tp=2), Place("left"), 0),  # each replica keeps its half
        (Place("left"), Place("left", tp=2), 1),  # each lacks the other's half
        (Place("left"), Place("right"), 1),
        (Place("left", tp=2), Place("right"), 1),  # replicas speak once
        (Place("left"), Place("right", tp=2), 2),  # two replicas need all
        (Place("all"), Place("left"), 0.5),
        (Place("all", tp=2), Place("left"), 0.5),  # two ranks share what they both hold
        (Place("all", tp=4), Place("all", tp=2), 0),
    ],
)
def test_expected_bytes(src: Place, dst: Place, copies: float) -> None:
    p = planned(chain_of("a", "b"), nodes={"a": src, "b": dst})
    (m,) = p.moves
    assert m.expected_bytes == copies * p.samples * 100


def test_the_most_specific_place_wins() -> None:
    left, right = Place("left"), Place("right")
    nodes = tuple(Node(i, role=r) for i, r in (("a", "actor"), ("b", "actor"), ("c", "critic")))
    p = planned(
        Flow("f", (), nodes), default=Place(tp=4), roles={"actor": left}, nodes={"b": right, "data": Place(tp=2)}
    )
    assert [str(p.partition_of(i).layout) for i in ("a", "b", "c", "data")] == ["dp2", "dp2", "dp1·tp4", "dp2·tp2"]
    assert [p.partition_of(i).layout.ranks for i in ("a", "b")] == [(0, 1), (2, 3)]


def test_the_loader_reads_where_its_first_reader_runs() -> None:
    p = planned(chain_of("a", "b"), default=Place("left"), nodes={"a": Place("right", tp=2)})
    assert p.partition_of("data") == Partition("p0", Layout((2, 3), 1, 2), whole_groups=True, balance=None)


# ---- errors ----


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"nodes": {"b": Place("rihgt")}}, "placement.nodes.b: unknown rank set 'rihgt'; did you mean 'right'?"),
        (
            {"roles": {"compute": Place("zzz")}},
            "placement.roles.compute: unknown rank set 'zzz'; known: all, left, right",
        ),
        ({"default": Place("lft")}, "placement.default: unknown rank set 'lft'; did you mean 'left'?"),
        (
            {"nodes": {"b": Place(dp=3)}},
            "placement.nodes.b: dp 3 × tp 1 does not fit rank set 'all' of 4 ranks (0-3);"
            " use one of: dp 4 × tp 1, dp 2 × tp 2, dp 1 × tp 4",
        ),
        (
            {"default": Place("right", tp=4)},
            "placement.default: tp 4 does not fit rank set 'right' of 2 ranks (2-3);"
            " use one of: dp 2 × tp 1, dp 1 × tp 2",
        ),
        (
            {"default": Place(tp=0)},
            "placement.default: tp 0 does not fit rank set 'all' of 4 ranks (0-3); use one of: dp 4",
        ),
        ({"nodes": {"bb": Place()}}, "placement.nodes: the flow has no node 'bb'; "),
        ({"nodes": {"dta": Place()}}, "placement.nodes: the flow has no node 'dta'; did you mean 'data'?"),
        ({"roles": {"compte": Place()}}, "placement.roles: no node has the role 'compte'; did you mean 'compute'?"),
        (
            {"default": Place("lft"), "roles": {"compute": Place("left")}},  # a place that no node uses
            "placement.default: unknown rank set 'lft'; did you mean 'left'?",
        ),
        (
            {"roles": {"compute": Place(tp=3)}, "nodes": {"a": Place(), "b": Place()}},
            "placement.roles.compute: tp 3 does not fit rank set 'all' of 4 ranks (0-3)",
        ),
        (
            {"default": Place(sp=2, tp=4)},
            "placement.default: sp 2 × tp 4 does not fit rank set 'all' of 4 ranks (0-3);"
            " use one of: dp 2 × sp 2 × tp 1, dp 1 × sp 2 × tp 2",
        ),
        (
            {"nodes": {"b": Place(sp=2)}},
            "placement.nodes.b.sp: 2, but it divides no sequences; that do only models that are trained or give"
            " log-probs; leave it out",
        ),
    ],
)
def test_a_wrong_placement_is_refused(where: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)):
        planned(chain_of("a", "b"), **where)


def test_nodes_that_divide_no_sequences_have_a_replica_on_each_of_these_ranks() -> None:
    flow = Flow(
        "f", ("prompt",), (Node("a", reads=("prompt",), writes=("x",)), Node("b", reads=("x",), sequence_parallel=True))
    )
    p = plan(flow, Placement(8, {}, Place(sp=2, tp=2)), Workload(8))
    assert p.partition_of("a").layout == Layout(tuple(range(8)), 4, 2)
    assert p.partition_of("b").layout == Layout(tuple(range(8)), 2, 2, 2)
    assert [(m.src, m.dst) for m in p.moves] == [(p.partition_of("a"), p.partition_of("b"))]
    assert {"dp": 2, "sp": 2, "tp": 2}.items() <= p.to_json()["partitions"][1].items()


@pytest.mark.parametrize(
    ("workers", "rank_sets", "message"),
    [
        (0, {}, "workers: 0; at least one worker is needed"),
        (4, {"all": "0-1"}, "placement.ranks.all: this name always means every worker"),
        (4, {"g": "0-4"}, "placement.ranks.g: '0-4' names ranks 0-4, but there are 4 workers (0-3)"),
    ],
)
def test_wrong_rank_sets_are_refused(workers: int, rank_sets: dict[str, str], message: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)):
        Placement(workers, rank_sets)


# ---- fewer prompts than workers, or a number that does not divide ----


def sizes(p: Plan, partition: Partition) -> list[int]:
    """Returns how many samples each replica has."""
    unit, dp = p.repeat if partition.whole_groups else 1, partition.layout.dp
    shares = [contiguous_share(p.samples // unit, dp, replica) for replica in range(dp)]
    return [(last - first) * unit for first, last in shares]


@pytest.mark.parametrize(
    ("prompts", "loaded", "generated"),
    [
        (8, [4, 4, 4, 4], [4, 4, 4, 4]),
        (2, [2, 0, 2, 0], [1, 1, 1, 1]),
        (1, [2, 0, 0, 0], [1, 0, 1, 0]),
        (5, [4, 2, 2, 2], [3, 2, 3, 2]),
    ],
)
def test_a_model_has_even_shares_though_whole_groups_would_not_divide(
    prompts: int, loaded: list[int], generated: list[int]
) -> None:
    p = planned(chain_of("a", type="inference"), prompts=prompts)
    assert sizes(p, p.partition_of("data")) == loaded
    assert sizes(p, p.partition_of("a")) == generated
    assert same_place(p, "data", "a") == (loaded == generated)
    for node in ("data", "a"):
        assert p.partition_of(node).largest_share(p.samples, p.repeat) == max(sizes(p, p.partition_of(node)))


def test_other_nodes_stay_where_their_inputs_are_however_many_there_are() -> None:
    for prompts in (1, 2, 3, 5):
        p = planned(chain_of("a", "b"), prompts=prompts)
        assert same_place(p, "data", "a", "b")
        assert not p.moves


def test_groups_come_together_after_a_model_had_parts_of_them() -> None:
    generate = Node("generate", type="inference", reads=("prompt",), writes=("score",))
    advantage = Node("advantage", reads=("score",), whole_groups=True)
    p = planned(Flow("grpo", ("prompt",), (generate, advantage)), prompts=2)
    first, second = p.moves
    assert [m.fields for m in p.moves] == [("prompt",), ("score",)]
    assert (first.src, first.dst) == (second.dst, second.src)
    assert first.expected_bytes == 2 * 100  # of four samples two stay


# ---- the same on every worker ----


def test_the_hash_changes_with_the_plan() -> None:
    def hash_of(**changed: Any) -> str:
        flow = changed.pop("flow", chain_of("a", "b"))
        return planned(flow, **changed).hash

    others = [
        hash_of(default=Place(tp=2)),
        hash_of(nodes={"b": Place("left")}),
        hash_of(workers=8),
        hash_of(prompts=16),
        hash_of(repeat=1),
        hash_of(flow=chain_of("a", "b", params={"x": 1})),
        hash_of(flow=chain_of("a", "b", call="m:f")),
        hash_of(flow=chain_of("a", "b", whole_groups=True), nodes={"b": Place("left", tp=2)}),
    ]
    assert hash_of() == hash_of()
    assert len({hash_of(), *others}) == 1 + len(others)


PLAN_IN_A_PROCESS = """
import sys
from distflow.plan.svg import svg
from distflow.plan.table import render
from distflow.run.program import Program

workers, *overrides = sys.argv[1:]
p = Program.load("examples/diamond/config.yaml", overrides).plan(int(workers))
assert svg(p)
assert render(p)
heavy = [m for m in ("torch", "ray", "transformers") if m in sys.modules]
print(p.hash, len(p.tasks), len(p.chains()), len(p.chain(int(workers) - 1)), *heavy)
"""


def plan_in_a_process(*args: str, hash_seed: str = "0") -> list[str]:
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", PLAN_IN_A_PROCESS, *args]
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.split()


def test_the_hash_is_the_same_in_every_process() -> None:
    assert plan_in_a_process("4", hash_seed="1") == plan_in_a_process("4", hash_seed="2")


def test_a_thousand_workers_are_planned_without_torch() -> None:
    shares = ("placement.ranks.rollout=0%-50%", "placement.ranks.train=50%-", "data.batch=1024")
    few, many = plan_in_a_process("4", *shares), plan_in_a_process("1024", *shares)
    assert many[1:] == few[1:]  # as many tasks and different chains as for four, and nothing heavy imported
    assert len(many) == 4
    assert many[0] != few[0]


@pytest.mark.parametrize(
    ("generate", "update", "expected"),
    [
        (Place("low"), Place("high"), 2 * 1000),  # each of two ranks needs a copy
        (Place("low", tp=2), Place("high"), 1000),  # two ranks share one
        (Place(), Place(), 4 * 750),  # each has a quarter itself
        (Place("low", tp=2), Place("low", tp=2), 0),
    ],
)
def test_the_expected_bytes_of_a_weight_sync(generate: Place, update: Place, expected: int) -> None:
    nodes = (
        Node("generate", "actor", reads=("prompt",), writes=("response",), generates=True, method=True),
        Node("update", "actor", "train", reads=("response",), method=True),
    )
    placement = Placement(4, {"low": "0-1", "high": "2-3"}, nodes={"generate": generate, "update": update})
    flow = Flow("f", ("prompt",), nodes)
    known, unknown = (plan(flow, placement, Workload(8, weights=w)) for w in ({"actor": 1000}, {}))
    (task,) = (t for t in known.tasks if isinstance(t, SyncWeights))
    assert task.expected_bytes == expected
    assert known.hash == unknown.hash  # estimates are no part of what the workers agree on


@pytest.mark.parametrize(
    ("where", "repeat", "unit"),
    [
        ({}, 2, 4),  # four replicas load whole groups, so each needs a prompt
        ({"default": Place("left")}, 2, 2),
        ({"default": Place("left"), "nodes": {"score": Place("all")}}, 2, 2),  # 2 prompts: 4 samples for 4 replicas
        ({"default": Place("left"), "nodes": {"score": Place("all")}}, 3, 4),
        ({"default": Place("left", tp=2), "nodes": {"score": Place("all")}}, 4, 1),
        ({"default": Place("left", tp=2), "nodes": {"keep": Place("right")}}, 1, 2),  # only those that judge are two
    ],
)
def test_a_round_of_dynamic_sampling_gives_all_replicas_of_its_nodes_equally_many(
    where: dict[str, Any], repeat: int, unit: int
) -> None:
    nodes = (
        Node("generate", type="inference", reads=("prompt",), writes=("tokens",)),
        Node("score", type="inference", reads=("tokens",), writes=("scores",)),
        Node("keep", reads=("scores",), writes=("kept",), whole_groups=True, dynamic_sampling=2),
        Node("train", type="train", reads=("tokens",)),
    )
    p = planned(Flow("sampling", ("prompt",), nodes), repeat=repeat, **where)
    (task,) = (t for t in p.tasks if isinstance(t, Resample))
    assert task.unit == unit
    assert task.rounds == 2
    for node in ("data", "generate", "score", "keep"):
        partition = p.partition_of(node)
        assert unit * (1 if partition.whole_groups else repeat) % partition.layout.dp == 0
