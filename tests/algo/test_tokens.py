"""Tokens: values per token and per sample are told apart by name, not by shape; samples may have no tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError, DataError

BUSY = settings(deadline=None)  # the first example waits for torch
LENGTHS = st.lists(st.integers(0, 5), max_size=8)


def some(lengths: list[int], **fields: dict[str, Tensor]) -> Tokens:
    return Tokens(torch.zeros(sum(lengths)), torch.tensor(lengths, dtype=torch.int64), **fields)  # type: ignore[arg-type]


def test_a_field_is_aligned_with_the_tokens() -> None:
    old = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tokens = some([3, 0, 1], per_token={"old": old}, per_sample={"score": torch.tensor([5.0, 6.0, 7.0])})
    assert torch.equal(tokens["old"], old)
    assert tokens["score"].tolist() == [5, 5, 5, 7]
    assert tokens.sum_per_sample(old).tolist() == pytest.approx([0.6, 0, 0.4])
    assert "old" in tokens
    assert "score" in tokens
    assert "ref" not in tokens


def test_as_many_tokens_as_samples_are_not_mixed_up() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    tokens = some([0, 2, 1], per_token={"a": values}, per_sample={"b": values})
    assert tokens["a"].tolist() == [1, 2, 3]
    assert tokens["b"].tolist() == [2, 2, 3]


@BUSY
@given(LENGTHS)
def test_expand_and_sum_per_sample_match_loops(lengths: list[int]) -> None:
    tokens = some(lengths)
    per_sample = torch.arange(len(lengths), dtype=torch.float64)
    per_token = torch.arange(sum(lengths), dtype=torch.float64) + 1
    assert tokens.expand(per_sample).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    parts = per_token.split(lengths) if lengths else ()
    assert tokens.sum_per_sample(per_token).tolist() == [float(p.sum()) for p in parts]


@settings(max_examples=20, deadline=None)
@given(LENGTHS.filter(lambda n: sum(n) > 0))
def test_expand_and_sum_per_sample_are_differentiable(lengths: list[int]) -> None:
    tokens = some(lengths)
    per_token = torch.randn(sum(lengths), dtype=torch.float64, requires_grad=True)
    per_sample = torch.randn(len(lengths), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tokens.sum_per_sample(x.square()), (per_token,))
    assert torch.autograd.gradcheck(lambda x: tokens.expand(x.square()), (per_sample,))


def test_a_missing_field_is_named() -> None:
    tokens = some([1], per_token={"old_logprobs": torch.zeros(1)}, per_sample={"advantage": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"needs field 'advantages', .* did you mean 'advantage'"):
        tokens["advantages"]
    with pytest.raises(ConfigError, match=r"needs field 'x', .* known: advantage, old_logprobs"):
        tokens["x"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: some([2], per_token={"a": torch.zeros(1)}), r"'a' is \[1\]; one value per token is \[2\]"),
        (lambda: some([2], per_token={"a": torch.zeros(2, 1)}), r"'a' is \[2, 1\]; one value per token is \[2\]"),
        (lambda: some([2], per_sample={"a": torch.zeros(2)}), r"'a' is \[2\]; one value per sample is \[1\]"),
        (lambda: some([1], per_token={"a": torch.zeros(1)}, per_sample={"a": torch.zeros(1)}), "'a' is given both"),
        (lambda: Tokens(torch.zeros(3), torch.tensor([1, 1])), "lengths sum to 2, but there are 3 tokens"),
        (lambda: Tokens(torch.zeros(1, 2), torch.tensor([2])), "must have one dimension"),
        (lambda: Tokens(torch.zeros(2), torch.tensor([2]), entropy=torch.zeros(1)), r"entropy is \[1\]"),
    ],
)
def test_mismatched_shapes_are_refused(make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
