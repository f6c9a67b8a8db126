"""The wire format: any column arrives unchanged, in segments whose size is known before they arrive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import KINDS, column, same, value
from distflow.batch import copy_ranges as copying
from distflow.batch.batch import Ragged
from distflow.batch.copy_ranges import copy_ranges
from distflow.comm.wire import DTYPES, FlatColumn, Packing, Segments, flatten, pack, segment_size, unpack
from distflow.errors import DataError

NAMES = [f"f{i}.{k.replace(' ', '_')}" for i, k in enumerate(KINDS)]


def pack_parts(
    columns: list[FlatColumn], parts: list[np.ndarray], in_pieces: bool = False
) -> tuple[torch.Tensor, Segments]:
    sizes = np.sum([c.lengths * c.item_bytes for c in columns], axis=0)
    ends = np.cumsum([segment_size(len(columns), len(p), int(np.sum(sizes[p]))) for p in parts])
    out = torch.full((int(ends[-1]),), 255, dtype=torch.uint8)
    segments = Segments(np.array([len(p) for p in parts]), np.concatenate(([0], ends[:-1])))
    if in_pieces:
        packing = Packing(columns, np.concatenate(parts), segments)
        out = torch.frombuffer(
            bytearray(b"".join(p for k in range(len(parts)) for p in packing.pieces(k))), dtype=out.dtype
        )
        assert len(out) == ends[-1]
    else:
        pack(columns, np.concatenate(parts), segments, out)
    return out, segments


@settings(max_examples=150, deadline=None)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True),
    parts=st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6), min_size=1, max_size=4),
    short=st.sampled_from([1, 512, 10**9]),
    in_pieces=st.booleans(),
)
def test_every_packed_value_is_unpacked(names: list[str], parts: list[list[int]], short: int, in_pieces: bool) -> None:
    ids = np.arange(20)
    packed = [flatten(column(n, ids), n) for n in names]
    before, copying.SHORT = copying.SHORT, short  # both ways of copying
    try:
        memory, segments = pack_parts(packed, [np.array(p) for p in parts], in_pieces)
    finally:
        copying.SHORT = before
    sent = np.concatenate([np.array(p) for p in parts])
    order = np.argsort(sent, kind="stable")
    columns = unpack(memory, segments, names, order, "test")
    for n in names:
        assert len(columns[n]) == len(sent)
        assert all(same(got, value(n, int(i))) for got, i in zip(columns[n], sent[order], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_sent(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8).clamp(max=1).view(dtype) if dtype == torch.bool else None
    values = torch.arange(48, dtype=torch.uint8).view(dtype) if raw is None else raw
    sent = Ragged.packed(values, np.array([len(values) - 1, 1]))
    memory, segments = pack_parts([flatten(sent, "x")], [np.array([1]), np.array([0])])
    got = unpack(memory, segments, ["x"], np.array([1, 0]), "test")["x"]
    assert isinstance(got, Ragged)
    assert got.dtype == dtype
    assert torch.equal(got.joined().view(torch.uint8), values.view(torch.uint8))


def test_ragged_columns_are_views_of_what_was_received() -> None:
    memory, segments = pack_parts([flatten(column("f.tokens", np.arange(4)), "x")], [np.arange(4)])
    got = unpack(memory, segments, ["x"], np.arange(4), "test")["x"]
    assert isinstance(got, Ragged)
    assert got.values.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_a_column_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(DataError, match="field 'x': has 6 dimensions per item; at most 5"):
        flatten(torch.zeros(1, 1, 1, 1, 1, 1, 1), "field 'x'")
    with pytest.raises(DataError, match=r"field 'x': dtype torch\.\w+ cannot be sent"):
        flatten(torch.zeros(2, dtype=torch.float8_e8m0fnu), "field 'x'")


def test_text_with_lone_surrogates_can_be_sent() -> None:
    rows = ["\ud800 alone", "", "é"]
    memory, segments = pack_parts([flatten(rows, "x")], [np.arange(3)])
    assert unpack(memory, segments, ["x"], np.arange(3), "test")["x"] == rows


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12), st.sampled_from([1, 10**9]))
def test_copy_ranges_copies_every_range(wanted: list[tuple[int, int]], short: int) -> None:
    source = torch.arange(100)
    starts = np.array([[a for a, _ in wanted]], np.int64) * 8
    sizes = np.array([[n for _, n in wanted]], np.int64) * 8
    out = torch.full((int(sizes.sum()) // 8 + 5,), -1)
    before, copying.SHORT = copying.SHORT, short
    try:
        copy_ranges([source], starts, out.view(torch.uint8), 40 + np.cumsum(sizes, axis=1) - sizes, sizes)
    finally:
        copying.SHORT = before
    assert out.tolist() == [-1] * 5 + [x for a, n in wanted for x in range(a, a + n)]
