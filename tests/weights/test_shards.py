"""Which part of a parameter each rank has, and what two parts have in common."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.plan import Layout
from distflow.weights import shards as weights
from distflow.weights.shards import Shards, TensorSpec, overlap, size, within

BUSY = settings(max_examples=100, deadline=None)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True))
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4) if len(ranks) % t == 0]))
    return Layout(tuple(ranks), len(ranks) // tp, tp)


@st.composite
def parameters(draw: st.DrawFn, layout: Layout) -> list[TensorSpec]:
    """Of any shape whose cut dimension can be cut; the first may be smaller than the number of shards."""
    result = []
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        dim = draw(st.sampled_from([None, *range(min(2, len(shape)))]))
        if dim is not None:
            shape[dim] = draw(st.integers(1, 3)) * layout.tp
        result.append(TensorSpec(f"p{i}", tuple(shape), dim))
    return result


def whole(specs: list[TensorSpec]) -> dict[str, Tensor]:
    """Returns parameters in which every element is a different number."""
    ends = torch.tensor([math.prod(s.shape) for s in specs]).cumsum(0).tolist()
    return {
        s.name: torch.arange(e - math.prod(s.shape), e).float().view(s.shape) for s, e in zip(specs, ends, strict=True)
    }


def part(shards: Shards, spec: TensorSpec, rank: int, full: Tensor) -> Tensor:
    """Returns the part of a rank as torch cuts: by tensor parallelism, then by FSDP."""
    d, t = divmod(shards.layout.ranks.index(rank), shards.layout.tp)
    if spec.tp_dim is not None:
        full = full.chunk(shards.layout.tp, spec.tp_dim)[t]
    if not spec.shape:
        return full
    chunks, s = full.chunk(shards.shard), d % shards.shard
    return chunks[s] if s < len(chunks) else full[:0]


@BUSY
@given(layouts().flatmap(lambda layout: st.tuples(st.just(layout), parameters(layout))), st.data())
def test_a_rank_has_the_part_that_torch_would_give_it(
    case: tuple[Layout, list[TensorSpec]], data: st.DataObject
) -> None:
    layout, specs = case
    shard = data.draw(st.sampled_from([n for n in range(1, layout.dp + 1) if layout.dp % n == 0]))
    shards, full = Shards(layout, shard), whole(specs)
    for spec in specs:
        everything = tuple((0, n) for n in spec.shape)
        for rank in layout.ranks:
            box, want = shards.box(spec, rank), part(shards, spec, rank, full[spec.name])
            assert torch.equal(full[spec.name][within(everything, box)], want)
            assert size(box) == want.numel()


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
