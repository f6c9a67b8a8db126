"""The overlong penalty: by hand, by its formula, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.reward_shaping import overlong_penalty
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch


def test_by_hand() -> None:
    got = overlong_penalty(torch.tensor([0, 16, 17, 18, 20, 21]), limit=20, buffer=4)
    assert got.dtype == torch.float32
    assert got.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(torch.tensor([18]), 20, 4, factor=3.0).tolist() == [-1.5]
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4).tolist() == [0, -0.25, -1]  # from the first token on
    assert overlong_penalty(torch.tensor([19, 20, 21]), 20, 0).tolist() == [0, -1, -1]  # a step
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), 20, 4).shape == (0,)


@BUSY
@given(st.lists(st.integers(0, 100)), st.integers(0, 80), st.data())
def test_matches_the_formula(lengths: list[int], limit: int, data: st.DataObject) -> None:
    buffer, factor = data.draw(st.integers(0, limit)), data.draw(st.floats(0, 5))
    want = []
    for n in lengths:
        if n >= limit:
            want.append(-factor)
        elif n <= limit - buffer:
            want.append(0.0)
        else:
            want.append((limit - buffer - n) / buffer * factor)
    got = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), limit, buffer, factor).tolist()
    assert got == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_invalid_arguments_are_refused() -> None:
    lengths = torch.tensor([1])
    for buffer in (-1, 21):
        with pytest.raises(ConfigError, match=f"buffer = {buffer}; it must be within 0 … 20, its limit"):
            overlong_penalty(lengths, 20, buffer)
    with pytest.raises(ConfigError, match="factor = -1"):
        overlong_penalty(lengths, 20, 4, -1)
