"""The critic's loss: by hand, a reference in loops, gradients, and nothing that is not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algo.losses import value
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError

BUSY = settings(deadline=None)  # the first example waits for torch
ROWS = st.lists(st.tuples(*[st.floats(-5, 5)] * 3), max_size=9)  # value, value before, return


def tokens_of(rows: list[tuple[float, float, float]], dtype: torch.dtype = torch.float64) -> Tokens:
    values, old, returns = torch.tensor(rows, dtype=dtype).reshape(-1, 3).T.contiguous()
    lengths = torch.tensor([0, len(rows), 0])
    return Tokens(values.clone().requires_grad_(), lengths, {"old_values": old, "returns": returns})


def test_by_hand() -> None:
    #        value, before, return: free 1/2·(v − R)², clipped to ±1
    rows = [(3.0, 1.0, 3.0), (3.0, 1.0, 1.0), (0.5, 1.0, 2.5), (-2.0, 1.0, -1.5)]
    tokens = tokens_of(rows)
    assert tokens.values is tokens.logprobs
    plain = value(tokens)
    assert plain.per_token.tolist() == [0, 2, 2, 0.125]
    assert plain.metrics["critic/clip_frac"].tolist() == [0, 0, 0, 0]
    clipped = value(tokens, clip=1.0)  # to 2, 2, 0.5, 0
    assert clipped.per_token.tolist() == [0.5, 2, 2, 1.125]
    assert clipped.metrics["critic/clip_frac"].tolist() == [1, 0, 0, 1]
    assert clipped.metrics["critic/vf_loss"].tolist() == [0.5, 2, 2, 1.125]
    assert clipped.metrics["critic/value"].tolist() == [3, 3, 0.5, -2]
    clipped.per_token.sum().backward()
    assert tokens.values.grad is not None
    assert tokens.values.grad.tolist() == [0, 2, -2, 0]  # beyond the clip nothing is to be gained
    assert not any(values.requires_grad for values in clipped.metrics.values())


@BUSY
@given(ROWS, st.none() | st.floats(0, 3))
def test_matches_the_reference(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    want = []
    for v, old, target in rows:
        choices = [(v - target) ** 2]
        if clip is not None:
            choices.append((min(max(v, old - clip), old + clip) - target) ** 2)
        want.append(0.5 * max(choices))
    got = value(tokens_of(rows), clip)
    np.testing.assert_allclose(got.per_token.detach().numpy(), want, rtol=1e-9, atol=1e-9)
    if clip is not None:
        assert (got.per_token >= value(tokens_of(rows)).per_token).all()


@BUSY
@given(ROWS, st.none() | st.floats(0, 3), st.sampled_from([-7.0, 0.5, 100.0]))
def test_a_shift_of_all_changes_nothing(
    rows: list[tuple[float, float, float]], clip: float | None, shift: float
) -> None:
    moved = [(v + shift, old + shift, target + shift) for v, old, target in rows]
    got, want = (value(tokens_of(r), clip).per_token.detach().numpy() for r in (moved, rows))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@BUSY
@given(ROWS, st.floats(0, 3))
def test_what_is_within_the_bounds_is_not_clipped(rows: list[tuple[float, float, float]], clip: float) -> None:
    """Not by rounding either."""
    result = value(tokens_of(rows, torch.float32), clip)
    for (v, old, _), flag in zip(rows, result.metrics["critic/clip_frac"].tolist(), strict=True):
        assert not (flag and abs(v - old) < clip - 1e-5)


def test_a_return_per_sample_is_for_each_of_its_tokens() -> None:
    tokens = Tokens(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1]), {}, {"returns": torch.tensor([1.0, 9, 2])})
    assert value(tokens).per_token.tolist() == [0, 0.5, 2]


def test_invalid_arguments_are_refused() -> None:
    tokens = Tokens(torch.zeros(1), torch.tensor([1]), {"returns": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"clip = -0\.1; it must be 0 or more"):
        value(tokens, -0.1)
    with pytest.raises(ConfigError, match="needs field 'old_values'"):
        value(tokens, 0.1)
    with pytest.raises(ConfigError, match="needs field 'returns'"):
        value(Tokens(torch.zeros(1), torch.tensor([1])))
