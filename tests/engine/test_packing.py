"""Micro-batches within a budget of tokens, and sequences in one row: where each token is, and what it predicts."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Column, Ragged
from distflow.engine.packing import Pack, micro_batches, nothing, pack, sequence_lengths

LENGTHS = st.lists(st.integers(0, 40), max_size=30)
SAMPLES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=10)  # prompt, response
BUSY = settings(deadline=None)


@BUSY
@given(LENGTHS, st.integers(1, 50))
@example([7, 0, 0, 60], 5)
def test_every_sample_is_in_one_micro_batch(lengths: list[int], budget: int) -> None:
    parts = micro_batches(np.array(lengths, np.int64), budget)
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(lengths)))
    assert all(len(part) for part in parts)


@BUSY
@given(LENGTHS, st.integers(1, 50))
@example([7, 0, 0, 60], 5)
def test_a_micro_batch_keeps_the_budget_unless_one_sample_exceeds_it(lengths: list[int], budget: int) -> None:
    for part in micro_batches(np.array(lengths, np.int64), budget):
        assert sum(lengths[i] for i in part) <= budget or len(part) == 1


@BUSY
@given(LENGTHS, st.integers(1, 50))
def test_no_two_micro_batches_would_fit_into_one(lengths: list[int], budget: int) -> None:
    sums = sorted(sum(lengths[i] for i in part) for part in micro_batches(np.array(lengths, np.int64), budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@BUSY
@given(LENGTHS, st.integers(1, 50))
def test_the_longest_come_first(lengths: list[int], budget: int) -> None:
    first = [lengths[part[0]] for part in micro_batches(np.array(lengths, np.int64), budget)]
    assert first == sorted(first, reverse=True)
    assert first[:1] == sorted(lengths)[::-1][:1]


def batch_of(samples: list[tuple[int, int]]) -> Batch:
    """Every token is a number of its own: 1000 × sample + place in prompt and response."""
    prompts = [torch.arange(p) + 1000 * i for i, (p, _) in enumerate(samples)]
    responses = [torch.arange(p, p + r) + 1000 * i for i, (p, r) in enumerate(samples)]
    columns: dict[str, Column] = {
        "prompt_tokens": Ragged.of(prompts),
        "response_tokens": Ragged.of(responses),
        "old_logprobs": Ragged.of([-r.float() for r in responses]),
        "advantage": torch.arange(len(samples)) / 10,
        "response": [str(i) for i in range(len(samples))],
    }
    return Batch(np.arange(len(samples)), np.arange(len(samples)), columns)


def some(samples: list[tuple[int, int]], data: st.DataObject) -> tuple[Pack, list[int]]:
    index = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, unique=True))
    return pack(batch_of(samples), np.array(index)), index


@BUSY
@given(SAMPLES, st.data())
def test_a_row_holds_each_sequence_once_without_its_last_token(
    samples: list[tuple[int, int]], data: st.DataObject
) -> None:
    packed, index = some(samples, data)
    assert sorted(packed.index.tolist()) == sorted(index)
    assert packed.lengths == [sum(samples[i]) - 1 for i in packed.index]
    assert packed.lengths == sequence_lengths(batch_of(samples))[packed.index].tolist()
    want = [1000 * int(i) + k for i in packed.index for k in range(sum(samples[i]) - 1)]
    assert packed.tokens.tolist() == want
    assert packed.positions.tolist() == [t % 1000 for t in want]
    assert packed.positions.dtype == packed.tokens.dtype == torch.int64


@BUSY
@given(SAMPLES, st.data())
def test_a_response_token_is_predicted_by_the_one_before_it(
    samples: list[tuple[int, int]], data: st.DataObject
) -> None:
    packed, _ = some(samples, data)
    assert torch.equal(packed.tokens[packed.keep] + 1, packed.targets)
    assert packed.responses.tolist() == [samples[i][1] for i in packed.index]
    assert packed.targets.tolist() == [
        1000 * int(i) + samples[i][0] + k for i in packed.index for k in range(samples[i][1])
    ]


@BUSY
@given(SAMPLES, st.data())
def test_fields_go_with_their_tokens_and_samples(samples: list[tuple[int, int]], data: st.DataObject) -> None:
    packed, _ = some(samples, data)
    assert torch.equal(packed.per_token["old_logprobs"], -packed.targets.float())
    assert torch.equal(packed.per_sample["advantage"], torch.from_numpy(packed.index) / 10)
    assert packed.per_token.keys() | packed.per_sample.keys() == {"old_logprobs", "advantage"}  # text stays out


@BUSY
@given(SAMPLES, st.data())
def test_sequences_of_one_length_are_side_by_side(samples: list[tuple[int, int]], data: st.DataObject) -> None:
    packed, _ = some(samples, data)
    assert packed.lengths == sorted(packed.lengths, reverse=True)


def test_an_empty_response_predicts_nothing() -> None:
    packed = pack(batch_of([(3, 0), (1, 0), (2, 2)]), np.arange(3))
    assert packed.index.tolist() == [2, 0, 1]
    assert packed.lengths == [3, 2, 0]
    assert packed.tokens.tolist() == [2000, 2001, 2002, 0, 1]
    assert packed.keep.tolist() == [1, 2]
    assert packed.targets.tolist() == [2002, 2003]
    assert packed.responses.tolist() == [2, 0, 0]


def test_nothing_is_one_token_that_predicts_nothing() -> None:
    packed = nothing()
    assert packed.tokens.tolist() == packed.positions.tolist() == [0]
    assert packed.lengths == [1]
    assert len(packed.keep) == len(packed.targets) == len(packed.responses) == len(packed.index) == 0
