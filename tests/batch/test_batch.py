"""Columns: ragged or dense tensors of any dtype, or Python objects; what a node may write, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.batch.batch import NO_SAMPLES, Batch, Column, Ragged, as_column, concat, select
from distflow.errors import DataError

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=8)


@settings(deadline=None)
@given(ROWS, st.data())
def test_ragged_keeps_each_sample_through_selection(rows: list[list[int]], data: st.DataObject) -> None:
    ragged = Ragged.of([torch.tensor(r, dtype=torch.int64) for r in rows])
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)), np.int64)
    selected = ragged.select(index)
    assert [r.tolist() for r in selected] == [rows[i] for i in index]
    assert selected.joined().tolist() == [x for i in index for x in rows[i]]
    assert selected.values is ragged.values  # nothing was copied


@settings(deadline=None)
@given(ROWS)
def test_padded_fills_up_to_the_longest_sample(rows: list[list[int]]) -> None:
    padded = Ragged.of([torch.tensor(r, dtype=torch.int64) for r in rows]).padded(fill=-9)
    longest = max(map(len, rows))
    assert padded.tolist() == [r + [-9] * (longest - len(r)) for r in rows]


def test_items_may_have_dimensions() -> None:
    rows = [torch.randn(n, 2, 3) for n in (2, 0, 1)]
    ragged = Ragged.of(rows)
    assert all(torch.equal(a, b) for a, b in zip(ragged, rows, strict=True))
    assert ragged.joined().shape == (3, 2, 3)
    assert ragged.select(np.array([2, 0])).joined().shape == (3, 2, 3)


def test_whatever_a_node_writes_becomes_a_column() -> None:
    assert torch.equal(as_column(np.array([1.5, 2.5]), 2, "x"), torch.tensor([1.5, 2.5], dtype=torch.float64))  # type: ignore[arg-type]
    assert isinstance(as_column([np.zeros(3), np.zeros(1)], 2, "x"), Ragged)
    assert torch.equal(as_column([torch.tensor(1), torch.tensor(2)], 2, "x"), torch.tensor([1, 2]))  # type: ignore[arg-type]
    assert as_column([np.float32(0.5), 2], 2, "x") == [0.5, 2]
    assert not as_column(torch.ones(2, requires_grad=True), 2, "x").requires_grad  # type: ignore[union-attr]
    nested = [{"path": "a.png", "size": [1, 2.5, None, True]}]
    assert as_column(nested, 1, "x") == nested


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(1.0), "is a single number"),
        (torch.ones(3), "has 3 values for 2 samples"),
        ([1], "has 1 values for 2 samples"),
        (5, "is a int; write a tensor"),
        ({1, 2}, "is a set"),
        ([torch.ones(1), 2], "sample 1 is a int, others are tensors"),
        ([torch.ones(1), torch.ones(1).double()], "sample 1 is torch.float64"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "must agree in dtype and in all dimensions but the first"),
        ([(1, 2), "a"], "sample 0 holds a tuple"),
        (["a", {"k": {3: 1}}], "sample 1 holds a dict with keys that are not text"),
        ([b"raw", "a"], "sample 0 holds a bytes"),
    ],
)
def test_a_value_that_would_not_arrive_unchanged_is_refused(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as e:
        as_column(value, 2, "node 'judge': field 'score'")
    assert str(e.value).startswith("node 'judge': field 'score': ")


def test_an_unknown_field_of_a_batch_is_an_error_with_a_suggestion() -> None:
    batch = Batch(np.arange(1), np.arange(1), {"response": [1]})
    with pytest.raises(DataError, match="no field 'respones'; did you mean 'response'"):
        batch["respones"]


def test_a_batch_selects_samples() -> None:
    rows = Ragged.of([torch.ones(n) for n in (1, 2, 3)])
    columns: dict[str, Column] = {"text": ["a", "b", "c"], "score": torch.arange(3.0), "rows": rows}
    batch = Batch(np.array([10, 11, 12]), np.array([5, 5, 6]), columns)
    selected = batch.select(np.array([2, 0]))
    assert (selected.ids.tolist(), selected.groups.tolist()) == ([12, 10], [6, 5])
    assert selected["text"] == ["c", "a"]
    assert selected["score"].tolist() == [2.0, 0.0]
    assert selected["rows"].lengths.tolist() == [3, 1]


def test_columns_without_samples_join_those_of_any_kind() -> None:
    assert concat([NO_SAMPLES, ["a"], NO_SAMPLES, ["b"]]) == ["a", "b"]
    dense = concat([NO_SAMPLES, torch.arange(2.0)])
    assert isinstance(dense, torch.Tensor)
    assert dense.tolist() == [0.0, 1.0]
    assert len(concat([NO_SAMPLES, NO_SAMPLES])) == 0
    assert len(select(NO_SAMPLES, np.empty(0, np.int64))) == 0
