"""The check of a weight sync: an engine that misses a weight, or a version, is noticed on any layout."""

from collections.abc import Generator

import torch
from hypothesis import given, settings
from torch import Tensor

from distflow.comm.collectives import SendReceive
from distflow.errors import WeightsError
from distflow.plan import Layout
from distflow.plan.topology import Topology
from distflow.weights.shards import Shards, TensorSpec, size
from distflow.weights.verify import WeightCheck
from simulate import simulate
from weights.test_weight_sync import Case, cases, whole

Messages = dict[int, str]


def outcomes(case: Case, versions: dict[int, int], held: dict[int, dict[str, Tensor]], dtype: torch.dtype) -> Messages:
    """Returns what the check says on each rank that refuses."""
    errors: Messages = {}

    def run(rank: int) -> Generator[SendReceive, Tensor, None]:
        check = WeightCheck(case.source, case.destination, rank, dtype)
        try:
            yield from check.agree(versions[rank])
            given = parts(case, rank, source=True)
            yield from check.compare(case.specs, given, held.get(rank, {}), versions[rank])
        except WeightsError as e:
            errors[rank] = str(e)

    simulate({rank: run(rank) for rank in case.ranks})
    return errors


def parts(case: Case, rank: int, source: bool) -> dict[str, Tensor]:
    shards, full = case.source if source else case.destination, whole(case.specs)
    if shards.layout.replica_of(rank) is None:
        return {}
    boxes = {s.name: tuple(slice(lo, hi) for lo, hi in shards.box(s, rank)) for s in case.specs}
    return {name: full[name][box].clone() for name, box in boxes.items()}


@settings(max_examples=40, deadline=None)
@given(cases())
def test_weights_that_were_handed_over_pass_on_any_layout(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        held = {r: {n: t.to(dtype) for n, t in parts(case, r, source=False).items()} for r in case.ranks}
        assert outcomes(case, dict.fromkeys(case.ranks, 3), held, dtype) == {}


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_weight_that_one_engine_misses_is_named(case: Case) -> None:
    rank = case.destination.layout.ranks[-1]
    held = {r: parts(case, r, source=False) for r in case.ranks}
    spec = next((s for s in case.specs if size(case.destination.box(s, rank))), None)
    if spec is None:
        return
    held[rank][spec.name] -= 1.0
    errors = outcomes(case, dict.fromkeys(case.ranks, 3), held, torch.float32)
    replica = case.destination.layout.replicas[-1]
    assert set(errors) == (set(replica) if case.destination.cuts(spec) else {rank})
    assert all(f"of version 3: {spec.name} differs" in message for message in errors.values())


@settings(max_examples=10, deadline=None)
@given(cases())
def test_ranks_with_different_versions_refuse_to_weight_sync(case: Case) -> None:
    versions = dict.fromkeys(case.ranks, 4)
    late = case.source.layout.ranks[-1]
    versions[late] = 3
    errors = outcomes(case, versions, {}, torch.float32) if len(case.ranks) > 1 else {}
    if len(case.ranks) > 1:
        assert set(errors) == case.ranks
        assert "syncs weights of version 3, and others versions 3 to 4" in errors[late]


def test_all_parameters_that_differ_are_counted() -> None:
    alone = Shards(Layout((0,), 1), 1)
    case = Case((TensorSpec("a", (2,)), TensorSpec("b", (3, 2)), TensorSpec("c", (1,))), alone, alone, Topology((0,)))
    held = {name: tensor + (name != "b") for name, tensor in whole(case.specs).items()}
    assert "a and 1 other parameters differ" in outcomes(case, {0: 0}, {0: held}, torch.float32)[0]
