"""The tokens that the model sampled: counted, selected, and put back in their places."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.response_mask import ModelTokens, model_token_counts
from distflow.errors import DataError

MASKS = st.lists(st.lists(st.sampled_from([0, 1]), max_size=6), min_size=1, max_size=6)


def batch_of(mask: list[list[int]], dtype: torch.dtype = torch.int64) -> Batch:
    """Tokens are numbered from 1 on."""
    lengths = np.array([len(row) for row in mask])
    columns: dict[str, Column] = {
        "response_tokens": Ragged.packed(torch.arange(int(lengths.sum())) + 1, lengths),
        "response_mask": Ragged.of([torch.tensor(row, dtype=dtype) for row in mask]),
    }
    return Batch(np.arange(len(mask)) + 70, np.arange(len(mask)), columns)


@settings(deadline=None)
@given(MASKS, st.sampled_from([torch.int8, torch.int64, torch.bool, torch.float32]))
def test_selected_and_put_back(mask: list[list[int]], dtype: torch.dtype) -> None:
    batch = batch_of(mask, dtype)
    model = ModelTokens.of(batch)
    tokens = batch["response_tokens"].joined()
    assert model.lengths.tolist() == model_token_counts(batch).tolist() == [sum(row) for row in mask]
    flags = [m for row in mask for m in row]
    own = [t for t, m in zip(tokens.tolist(), flags, strict=True) if m]
    assert model.select(tokens).tolist() == own
    spread = model.spread(torch.tensor(own, dtype=torch.float32))
    assert spread.lengths.tolist() == [len(row) for row in mask]
    assert spread.joined().tolist() == [t * m for t, m in zip(tokens.tolist(), flags, strict=True)]


def test_without_a_mask_all_tokens_are_the_models() -> None:
    tokens = Ragged.of([torch.arange(3), torch.arange(2)])
    model = ModelTokens.of(Batch(np.arange(2), np.arange(2), {"response_tokens": tokens}))
    values = torch.rand(5)
    assert model.lengths.tolist() == [3, 2]
    assert model.select(values) is values
    assert model.spread(values).values.data_ptr() == values.data_ptr()


def test_a_mask_that_does_not_fit_is_refused() -> None:
    batch = batch_of([[1, 0], [1]])
    batch.columns["response_mask"] = Ragged.of([torch.ones(2), torch.ones(3)])
    with pytest.raises(DataError, match="sample 71: 'response_mask' has 3 values for a response of 1 tokens"):
        ModelTokens.of(batch)
    with pytest.raises(DataError, match="'response_mask' must be 1 for tokens that the model sampled and 0 for"):
        ModelTokens.of(batch_of([[1, 2]]))
