"""The penalty for long responses: by hand, by its formula, and what cannot be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.shaping import overlong
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch


def test_by_hand() -> None:
    got = overlong(torch.tensor([0, 16, 17, 18, 20, 21]), limit=20, buffer=4)
    assert got.dtype == torch.float32
    assert got.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong(torch.tensor([18]), 20, 4, penalty=3.0).tolist() == [-1.5]
    assert overlong(torch.tensor([0, 1, 4]), 4, 4).tolist() == [0, -0.25, -1]  # from the first token on
    assert overlong(torch.tensor([19, 20, 21]), 20, 0).tolist() == [0, -1, -1]  # a step
    assert overlong(torch.zeros(0, dtype=torch.int64), 20, 4).shape == (0,)


@BUSY
@given(st.lists(st.integers(0, 100)), st.integers(0, 80), st.data())
def test_as_the_formula_says(lengths: list[int], limit: int, data: st.DataObject) -> None:
    buffer, penalty = data.draw(st.integers(0, limit)), data.draw(st.floats(0, 5))
    want = []
    for n in lengths:
        if n >= limit:
            want.append(-penalty)
        elif n <= limit - buffer:
            want.append(0.0)
        else:
            want.append((limit - buffer - n) / buffer * penalty)
    got = overlong(torch.tensor(lengths, dtype=torch.int64), limit, buffer, penalty).tolist()
    assert got == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_what_cannot_be_is_refused() -> None:
    lengths = torch.tensor([1])
    for buffer in (-1, 21):
        with pytest.raises(ConfigError, match=f"buffer = {buffer}; it must be within 0 … 20, its limit"):
            overlong(lengths, 20, buffer)
    with pytest.raises(ConfigError, match="penalty = -1"):
        overlong(lengths, 20, 4, -1)
