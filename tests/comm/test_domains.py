"""Domains: where samples are assigned in blocks, and where all know the assignment already."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distflow.batch.copy_ranges import SHORT
from distflow.comm import domains
from distflow.comm.domains import Domains, contiguous_assignment
from distflow.plan import Layout, Move, Partition, Plan
from distflow.plan.topology import Topology
from test_every_field_arrives import check_random_plan


def partition(name: str, ranks: range, tp: int = 1) -> Partition:
    return Partition(name, Layout(tuple(ranks), len(ranks) // tp, tp), True, None)


def domains_of(moves: list[Move], samples: int, repeat: int = 1) -> Domains:
    partitions = {p.id: p for m in moves for p in (m.src, m.dst)}
    plan = Plan(None, 1024, {}, samples, repeat, {}, tuple(partitions.values()), {}, tuple(moves))  # type: ignore[arg-type]
    return Domains(plan, samples)


def move(name: str, src: Partition, dst: Partition, assigns: bool) -> Move:
    return Move(name, src, dst, ("x",), assigns, 0)


A, B, C = partition("a", range(1024)), partition("b", range(1024), tp=2), partition("c", range(512, 1024))


def test_a_domain_has_at_most_so_many_replicas_and_an_equal_part_of_the_step() -> None:
    first = move("m0", A, B, assigns=True)
    of_moves = domains_of([first], 2048)
    seen = {}
    for rank in range(1024):
        d = of_moves.of(first, rank)
        assert d.move.src.layout.dp <= domains.MAX_REPLICAS
        assert rank in d.move.ranks
        assert not d.known
        seen[d.first] = d.move.ranks
    assert sorted(seen) == list(range(0, 2048, 128))
    assert sorted(r for ranks in seen.values() for r in ranks) == list(range(1024))


@pytest.mark.parametrize(("workers", "replicas"), [(1000, 25), (945, 35), (1021, 1021), (771, 257)])
def test_numbers_that_are_no_powers_of_two_have_domains_too(workers: int, replicas: int) -> None:
    """But not of few replicas, which would have little to balance with."""
    all_to_all = move("m0", partition("a", range(workers)), partition("b", range(workers)), assigns=True)
    assert domains_of([all_to_all], 2 * workers).of(all_to_all, 0).move.dst.layout.dp == replicas


def test_blocks_that_do_not_correspond_are_one_domain() -> None:
    """Half of the ranks get all samples: those they have may stay only if all are assigned together."""
    half = move("m0", A, C, assigns=True)
    assert domains_of([half], 2048).of(half, 600).samples == 2048


def test_an_assignment_is_known_to_ranks_that_took_part_in_it() -> None:
    there, back, elsewhere = move("m0", A, B, True), move("m1", A, B, False), move("m2", C, B, False)
    of_moves = domains_of([there, back, elsewhere], 2048)
    assert of_moves.of(back, 5).known  # contiguous shares, and an assignment of these ranks
    assert not of_moves.of(elsewhere, 600).known  # the ranks of C took part, but all over B's domains
    contiguous = move("m3", A, B, assigns=False)  # into a partition that no move has assigned
    assert domains_of([contiguous], 2048).of(contiguous, 0).known


def test_shares_are_contiguous_and_keep_groups_whole() -> None:
    assert contiguous_assignment(partition("p", range(4)), 12, 2).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("most_replicas", [1, 2])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), workers=st.sampled_from([4, 6, 8]), in_pieces=st.booleans())
def test_every_reader_sees_what_the_writer_wrote_in_small_domains(
    most_replicas: int, rng: random.Random, workers: int, in_pieces: bool
) -> None:
    """Also if columns are sent from where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domains, "MAX_REPLICAS", most_replicas)
        patch.setattr("distflow.comm.wire.SHORT", 0 if in_pieces else SHORT)
        check_random_plan(rng, workers)


def test_topology_knows_who_shares_a_host() -> None:
    topology = Topology.of(["a", "b", "a", "c"])
    assert topology.hosts == (0, 1, 0, 2)
    assert topology.same_host(0, 2)
    assert not topology.same_host(0, 1)
    assert Topology.single(3).same_host(0, 2)
