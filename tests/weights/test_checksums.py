"""Checksums of parameters: the same for any cut, another one for any change."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.plan import Layout
from distflow.weights.checksums import checksum, checksums, counted
from distflow.weights.shards import Shards, TensorSpec, slices

SPECS = (
    TensorSpec("embedding", (13, 4)),
    TensorSpec("column", (12, 5), 0),
    TensorSpec("row", (6, 12), 1),
    TensorSpec("bias", (12,), 0),
    TensorSpec("norm", (7,)),
    TensorSpec("scalar", ()),
    TensorSpec("kernel", (3, 4, 5)),
)


def whole(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {s.name: torch.randn(s.shape, generator=noise).to(dtype) for s in SPECS}


def total(shards: Shards, parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Adds up the contributions of one copy of the parameters."""
    ranks = [r for replica in shards.layout.replicas[: shards.shard] for r in replica]
    parts = {r: {s.name: parameters[s.name][slices(shards.box(s, r))] for s in SPECS} for r in ranks}
    sums = [checksums(SPECS, shards, r, parts[r], dtype) * torch.tensor(counted(SPECS, shards, r)) for r in ranks]
    return torch.stack(sums).sum(0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4, 5]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_checksum_does_not_depend_on_how_the_parameters_are_cut(
    tp: int, shard: int, blocks: bool, dtype: torch.dtype
) -> None:
    cut = {"embedding": 8} if blocks and tp > 1 and shard == 1 else {}
    shards = Shards(Layout(tuple(range(shard * tp)), shard, tp), shard, cut)
    alone = Shards(Layout((0,), 1), 1)
    assert torch.equal(total(shards, whole(), dtype), total(alone, whole(), dtype))


@given(st.sampled_from(SPECS), st.randoms(use_true_random=False), st.sampled_from([0, 1, 7, 22, 30, 31]))
def test_one_flipped_bit_changes_the_checksum_of_its_parameter_alone(spec: TensorSpec, rng: object, bit: int) -> None:
    alone = Shards(Layout((0,), 1), 1)
    changed = whole()
    bits = changed[spec.name].view(torch.int32).view(-1)
    at = rng.randrange(len(bits))  # type: ignore[attr-defined]
    bits[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    differs = total(alone, whole(), torch.float32) != total(alone, changed, torch.float32)
    assert [s.name for s, d in zip(SPECS, differs.tolist(), strict=True) if d] == [spec.name]


@pytest.mark.parametrize("swap", [(0, 1), (3, 12)])
def test_swapped_rows_are_noticed(swap: tuple[int, int]) -> None:
    rows = torch.arange(13)
    rows[list(swap)] = rows[list(reversed(swap))]
    a = whole()["embedding"]
    assert checksum(a, ((0, 13), (0, 4))) != checksum(a[rows], ((0, 13), (0, 4)))
    assert checksum(a, ((0, 13), (0, 4))) != checksum(a, ((1, 14), (0, 4)))


def test_an_element_in_the_wrong_place_is_noticed_even_if_rows_became_columns() -> None:
    """As in a transposed square matrix, in which every row and column, as a set, may be the same."""
    square, box = whole()["row"][:, :6].contiguous(), ((0, 6), (0, 6))
    assert checksum(square, box) != checksum(square.T.contiguous(), box)
    corners = torch.zeros(6, 6)
    corners[1, 4] = 1.0
    assert (
        len({int(checksum(c, box)) for c in (corners, corners.T.contiguous(), corners.flip(0), corners.flip(1))}) == 4
    )
    kernel, cube = torch.randn(4, 4, 4), ((0, 4),) * 3
    permuted = [
        kernel.permute(p).contiguous() for p in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))
    ]
    assert len({int(checksum(k, cube)) for k in permuted}) == 6


def test_large_parameters_are_read_in_blocks() -> None:
    shape = (3001, 257)
    a = torch.randn(shape)
    box = tuple((0, n) for n in shape)
    parts = checksum(a[:1000], ((0, 1000), box[1])) + checksum(a[1000:], ((1000, 3001), box[1]))
    assert checksum(a, box) == parts == checksum(a.T.contiguous().T, box)
    assert math.prod(shape) > 1 << 18
