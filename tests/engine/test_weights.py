"""The weight hand-over between layouts: every rank gets exactly its part, and what it already has is not sent."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.data.exchange import AllToAll, Collective
from distflow.engine import weights
from distflow.engine.weights import HandOver, Shards, Spec, overlap, size, within
from distflow.plan import Layout
from simulate import simulate

BUSY = settings(max_examples=100, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4) if len(ranks) % t == 0]))
    return Layout(tuple(ranks), len(ranks) // tp, tp)


@st.composite
def parameters(draw: st.DrawFn, *users: Layout) -> list[Spec]:
    """Of any shape whose cut dimension can be cut; the first may be smaller than the number of shards."""
    result = []
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        dim = draw(st.sampled_from([None, *range(min(2, len(shape)))]))
        if dim is not None:
            shape[dim] = draw(st.integers(1, 3)) * math.lcm(*(layout.tp for layout in users))
        result.append(Spec(f"p{i}", tuple(shape), dim))
    return result


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[Spec], Layout, Layout]:
    source = draw(layouts())
    target = draw(st.one_of(layouts(), st.just(source)))
    return draw(parameters(source, target)), source, target


def whole(specs: list[Spec]) -> dict[str, Tensor]:
    """Returns parameters in which every element is a different number."""
    ends = torch.tensor([math.prod(s.shape) for s in specs]).cumsum(0).tolist()
    return {
        s.name: torch.arange(e - math.prod(s.shape), e).float().view(s.shape) for s, e in zip(specs, ends, strict=True)
    }


def part(shards: Shards, spec: Spec, rank: int, full: Tensor) -> Tensor:
    """Returns the part of a rank as torch cuts: by tensor parallelism, then by FSDP."""
    d, t = divmod(shards.layout.ranks.index(rank), shards.layout.tp)
    if spec.tp_dim is not None:
        full = full.chunk(shards.layout.tp, spec.tp_dim)[t]
    if not spec.shape:
        return full
    chunks, s = full.chunk(shards.shard), d % shards.shard
    return chunks[s] if s < len(chunks) else full[:0]


class Run:
    """Runs a hand-over among all ranks in one process; records what each has, sent and received."""

    def __init__(self, specs: list[Spec], source: Shards, target: Shards, dtype: torch.dtype = torch.float32) -> None:
        full = whole(specs)
        self.sent: dict[int, dict[int, int]] = {}
        self.received: dict[int, dict[int, int]] = {}
        self.targets: dict[int, dict[str, Tensor]] = {}
        self.sources: dict[int, dict[str, Tensor]] = {}
        everybody = {*source.layout.ranks, *target.layout.ranks}
        for r in everybody:
            has = specs if r in source.layout.ranks else []
            wants = specs if r in target.layout.ranks else []
            self.sources[r] = {s.name: part(source, s, r, full[s.name]).clone() for s in has}
            self.targets[r] = {
                s.name: torch.full_like(part(target, s, r, full[s.name]), math.nan, dtype=dtype) for s in wants
            }
        steps = {
            r: self.watched(r, HandOver(specs, source, target, r, dtype).run(self.sources[r], self.targets[r]))
            for r in everybody
        }
        self.exchanges = simulate(steps)

    def watched(self, rank: int, steps: Iterator[Collective]):
        sent, received = self.sent.setdefault(rank, {}), self.received.setdefault(rank, {})
        for wish in steps:
            assert isinstance(wish, AllToAll)
            for r, out, back in zip(wish.ranks, wish.send, wish.receive, strict=True):
                sent[r] = sent.get(r, 0) + out
                received[r] = received.get(r, 0) + back
            yield wish


@BUSY
@given(layouts().flatmap(lambda layout: st.tuples(st.just(layout), parameters(layout))), st.data())
def test_a_rank_has_the_part_that_torch_would_give_it(case: tuple[Layout, list[Spec]], data: st.DataObject) -> None:
    layout, specs = case
    shard = data.draw(st.sampled_from([n for n in range(1, layout.dp + 1) if layout.dp % n == 0]))
    shards, full = Shards(layout, shard), whole(specs)
    for spec in specs:
        everything = tuple((0, n) for n in spec.shape)
        for rank in layout.ranks:
            box, want = shards.box(spec, rank), part(shards, spec, rank, full[spec.name])
            assert torch.equal(full[spec.name][within(everything, box)], want)
            assert size(box) == want.numel()


@BUSY
@given(transfers(), st.sampled_from([1, 100, 1 << 26]))
@example(([Spec("p", (2, 3))], Layout((0, 1, 2, 3), 4), Layout((0, 1, 2, 3), 4)), 1)  # two ranks hold nothing
@example(([Spec("p", (6, 4), 1)], Layout((0, 1, 2, 3), 2, 2), Layout((4, 5), 1, 2)), 1)
@example(([Spec("p", (8,), 0)], Layout((3, 2, 1, 0), 2, 2), Layout((0, 1, 2, 3), 1, 4)), 1)
def test_every_target_rank_gets_exactly_its_part(case: tuple[list[Spec], Layout, Layout], bucket: int) -> None:
    specs, source, target = case
    with patch.object(weights, "_BUCKET", bucket):
        done = Run(specs, Shards(source, source.dp), Shards(target, 1))
    full = whole(specs)
    for rank in target.ranks:
        for spec in specs:
            assert torch.equal(done.targets[rank][spec.name], part(Shards(target, 1), spec, rank, full[spec.name]))
    for rank in source.ranks:
        for spec in specs:  # and what was sent is still there
            assert torch.equal(done.sources[rank][spec.name], part(Shards(source, source.dp), spec, rank, full[spec.name]))


@BUSY
@given(transfers())
def test_only_what_a_rank_lacks_is_sent_to_it(case: tuple[list[Spec], Layout, Layout]) -> None:
    specs, source, target = case
    done = Run(specs, Shards(source, source.dp), Shards(target, 1))

    def numbers(tensors: dict[str, Tensor]) -> set[float]:
        return {x for t in tensors.values() for x in t.flatten().tolist()}

    for rank in {*source.ranks, *target.ranks}:
        lacks = numbers(done.targets[rank]) - numbers(done.sources[rank])
        assert sum(done.received[rank].values()) == 4 * len(lacks)
        assert done.sent[rank].get(rank, 0) == done.received[rank].get(rank, 0) == 0  # nobody sends to itself
        for other, count in done.sent[rank].items():
            assert done.received[other][rank] == count


@BUSY
@given(transfers())
def test_weights_are_sent_in_the_dtype_they_are_used_in(case: tuple[list[Spec], Layout, Layout]) -> None:
    specs, source, target = case
    shards = Shards(source, source.dp), Shards(target, 1)
    half, full = Run(specs, *shards, torch.bfloat16), Run(specs, *shards)
    assert {r: sum(b.values()) for r, b in full.received.items()} == {
        r: 2 * sum(b.values()) for r, b in half.received.items()
    }
    for rank in target.ranks:
        for spec in specs:
            assert torch.equal(half.targets[rank][spec.name], full.targets[rank][spec.name].bfloat16())


def test_nothing_is_sent_where_every_rank_has_it_all() -> None:
    layout = Layout((0, 1), 1, 2)
    done = Run([Spec("a", (4, 2), 0), Spec("b", (3,))], Shards(layout, 1), Shards(layout, 1))
    assert not any(sum(b.values()) for b in done.received.values())


def test_replicas_share_the_sending() -> None:
    """Norms, which tensor parallelism does not cut, come from different members of a cell."""
    specs = [Spec("norm", (8,))]
    done = Run(specs, Shards(Layout((0, 1, 2, 3), 1, 4), 1), Shards(Layout((4, 5, 6, 7), 4), 1))
    assert [sum(done.sent[r].values()) for r in range(4)] == [32] * 4


def test_large_models_are_sent_in_several_exchanges() -> None:
    specs = [Spec(f"p{i}", (4, 4)) for i in range(6)]
    shards = Shards(Layout((0, 1), 2), 2), Shards(Layout((2,), 1), 1)
    assert Run(specs, *shards).exchanges == 1
    with patch.object(weights, "_BUCKET", 128):  # bytes: two of them
        assert Run(specs, *shards).exchanges == 3


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (((0, 4),), ((2, 6),), ((2, 4),)),
        (((0, 4), (1, 2)), ((0, 4), (0, 9)), ((0, 4), (1, 2))),
        (((0, 4),), ((4, 6),), None),
        (((0, 4), (0, 2)), ((1, 3), (2, 4)), None),
        (((3, 3),), ((0, 9),), None),
    ],
)
def test_boxes_overlap_where_both_are(a: weights.Box, b: weights.Box, both: weights.Box | None) -> None:
    assert overlap(a, b) == overlap(b, a) == both
