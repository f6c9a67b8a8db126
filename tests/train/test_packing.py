"""Micro-batches within a budget of tokens, and sequences in one row: where each token is, and what it predicts."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distflow.batch.batch import Batch, Column, Ragged
from distflow.train.packing import Pack, empty_pack, micro_batches, pack

PROMPTS = (1, 3, 3, 6, 2)  # tokens of each
SAMPLES = st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 9)), min_size=1, max_size=12)
BUSY = settings(deadline=None)
Samples = list[tuple[int, int]]  # prompt, tokens of the response


def batch_of(samples: Samples) -> Batch:
    """Every token is a number of its own, except that samples may share a prompt. Neighbours follow each other."""
    responses = [torch.arange(r) + 1000 * (i + 1) for i, (_, r) in enumerate(samples)]
    columns: dict[str, Column] = {
        "prompt_tokens": Ragged.of([torch.arange(PROMPTS[p]) + 100 * p for p, _ in samples]),
        "response_tokens": Ragged.of(responses),
        "old_logprobs": Ragged.of([-r.float() for r in responses]),
        "advantage": torch.arange(len(samples)) / 10,
        "response": [str(i) for i in range(len(samples))],
    }
    return Batch(np.arange(len(samples)), np.arange(len(samples)), columns)


def size(samples: Samples, index: list[int]) -> int:
    """Tokens that are computed for these samples, each prompt once."""
    return sum(PROMPTS[p] for p in {samples[i][0] for i in index}) + sum(max(0, samples[i][1] - 1) for i in index)


def parts(samples: Samples, budget: int) -> list[list[int]]:
    return [part.tolist() for part in micro_batches(batch_of(samples), np.arange(len(samples)), budget)]


@BUSY
@given(SAMPLES, st.integers(1, 50))
@example([(3, 9), (0, 0), (0, 0), (3, 9)], 5)
def test_every_sample_is_in_one_micro_batch(samples: Samples, budget: int) -> None:
    micros = parts(samples, budget)
    assert sorted(i for part in micros for i in part) == list(range(len(samples)))
    assert all(micros)


@BUSY
@given(SAMPLES, st.integers(1, 50))
@example([(3, 9), (0, 0), (0, 0), (3, 9)], 5)
def test_a_micro_batch_keeps_the_budget_unless_one_sample_exceeds_it(samples: Samples, budget: int) -> None:
    for part in parts(samples, budget):
        # An empty response beside one that is too long costs nothing.
        assert size(samples, part) <= budget or sum(samples[i][1] > 1 for i in part) <= 1


@BUSY
@given(SAMPLES, st.integers(1, 50))
def test_no_two_micro_batches_would_fit_into_one(samples: Samples, budget: int) -> None:
    micros = parts(samples, budget)
    for i, one in enumerate(micros):
        for other in micros[i + 1 :]:
            shares = {samples[k][0] for k in one} & {samples[k][0] for k in other}
            assert shares or size(samples, one + other) > budget


@BUSY
@given(SAMPLES)
def test_samples_of_a_prompt_stay_together_where_they_fit(samples: Samples) -> None:
    largest = max(size(samples, [i for i, s in enumerate(samples) if s[0] == p]) for p in range(len(PROMPTS)))
    home: dict[int, int] = {}
    for k, part in enumerate(parts(samples, largest)):
        for i in part:
            assert home.setdefault(samples[i][0], k) == k


def test_a_subset_of_the_samples_can_be_split() -> None:
    chosen = micro_batches(batch_of([(0, 3), (1, 4), (0, 2), (2, 1)]), np.array([3, 0]), 4)
    assert sorted(part.tolist() for part in chosen) == [[0], [3]]


def pack_some(samples: Samples, data: st.DataObject) -> tuple[Pack, list[int]]:
    index = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, unique=True))
    return pack(batch_of(samples), np.array(index)), index


def sequences(samples: Samples, packed: Pack) -> list[list[int]]:
    """Prompt and response of each sample that has one, without the last token."""
    batch = batch_of(samples)
    rows = [(batch["prompt_tokens"][i].tolist(), batch["response_tokens"][i].tolist()) for i in packed.index]
    return [prompt + response[:-1] for prompt, response in rows if response]


@BUSY
@given(SAMPLES, st.data())
def test_a_token_is_packed_once_and_expanding_gives_complete_sequences(samples: Samples, data: st.DataObject) -> None:
    packed, index = pack_some(samples, data)
    assert sorted(packed.index.tolist()) == sorted(index)
    whole = sequences(samples, packed)
    if not whole:
        assert packed.tokens.tolist() == packed.positions.tolist() == [0]
        return
    assert packed.lengths == [len(s) for s in whole]
    assert sorted(packed.tokens.tolist()) == sorted({t for s in whole for t in s})
    rows = torch.arange(len(packed.tokens)) if packed.shared is None else packed.shared.rows
    assert packed.tokens[rows].tolist() == [t for s in whole for t in s]
    assert packed.positions[rows].tolist() == [k for s in whole for k in range(len(s))]
    assert packed.positions.dtype == packed.tokens.dtype == torch.int64
    if packed.shared is not None:
        assert torch.equal(rows[packed.shared.first_places], torch.arange(len(packed.tokens)))
        places = torch.cat((packed.shared.first_places, packed.shared.repeats))
        assert sorted(places.tolist()) == list(range(len(rows)))
        ends = np.cumsum(packed.lengths)  # the queries of a sequence are its last tokens, one sequence after the other
        last = [np.arange(end - own, end) for end, own in zip(ends, packed.shared.own, strict=True)]
        assert np.concatenate(last).tolist() == packed.shared.first_places.tolist()


@BUSY
@given(SAMPLES, st.data())
def test_a_response_token_is_predicted_by_the_one_before_it(samples: Samples, data: st.DataObject) -> None:
    packed, _ = pack_some(samples, data)
    batch = batch_of(samples)
    before = [
        [int(batch["prompt_tokens"][i][-1]), *batch["response_tokens"][i].tolist()][:-1] for i in packed.index.tolist()
    ]
    assert packed.tokens[packed.keep].tolist() == [t for row in before for t in row]
    assert packed.responses.tolist() == [samples[i][1] for i in packed.index]
    assert packed.targets.tolist() == [t for i in packed.index.tolist() for t in batch["response_tokens"][i].tolist()]


@BUSY
@given(SAMPLES, st.data())
def test_fields_go_with_their_tokens_and_samples(samples: Samples, data: st.DataObject) -> None:
    packed, _ = pack_some(samples, data)
    assert torch.equal(packed.per_token["old_logprobs"], -packed.targets.float())
    assert torch.equal(packed.per_sample["advantage"], torch.from_numpy(packed.index) / 10)
    assert packed.per_token.keys() | packed.per_sample.keys() == {"old_logprobs", "advantage"}  # text stays out


@BUSY
@given(SAMPLES, st.data())
def test_masked_tokens_are_context_only(samples: Samples, data: st.DataObject) -> None:
    """The same rows with or without a mask; only what is predicted, and all fields of tokens, are the model's."""
    batch, index = batch_of(samples), np.arange(len(samples))
    mask = [data.draw(st.lists(st.sampled_from([0, 1]), min_size=r, max_size=r)) for _, r in samples]
    column = Ragged.of([torch.tensor(m, dtype=torch.int8) for m in mask])
    masked, plain = pack(Batch(index, index, {**batch.columns, "response_mask": column}), index), pack(batch, index)
    assert masked.tokens.tolist() == plain.tokens.tolist()
    assert masked.positions.tolist() == plain.positions.tolist()
    assert masked.lengths == plain.lengths
    own = [bool(m) for i in plain.index.tolist() for m in mask[i]]
    assert masked.targets.tolist() == [t for t, m in zip(plain.targets.tolist(), own, strict=True) if m]
    assert masked.keep.tolist() == [t for t, m in zip(plain.keep.tolist(), own, strict=True) if m]
    assert masked.responses.tolist() == [sum(mask[i]) for i in plain.index.tolist()]
    assert torch.equal(masked.per_token["old_logprobs"], -masked.targets.float())
    assert torch.equal(masked.per_sample["advantage"], plain.per_sample["advantage"])
    assert masked.per_token.keys() | masked.per_sample.keys() == {"old_logprobs", "advantage"}
    want = [[t * m for t, m in zip(batch["response_tokens"][i].tolist(), mask[i], strict=True)] for i in plain.index]
    assert [row.tolist() for row in masked.model_tokens.spread(masked.targets)] == want


@BUSY
@given(SAMPLES, st.data())
def test_sequences_of_one_length_are_side_by_side(samples: Samples, data: st.DataObject) -> None:
    packed, _ = pack_some(samples, data)
    assert packed.lengths == sorted(packed.lengths, reverse=True)


def test_a_sample_with_an_empty_response_is_left_out() -> None:
    packed = pack(batch_of([(1, 0), (0, 0), (4, 2)]), np.arange(3))
    assert packed.index.tolist() == [2, 0, 1]
    assert packed.lengths == [3]
    assert packed.tokens.tolist() == [400, 401, 3000]
    assert packed.keep.tolist() == [1, 2]
    assert packed.targets.tolist() == [3000, 3001]
    assert packed.responses.tolist() == [2, 0, 0]


def test_an_empty_pack_is_one_token_that_predicts_nothing() -> None:
    packed = empty_pack()
    assert packed.tokens.tolist() == packed.positions.tolist() == [0]
    assert packed.lengths == [1]
    assert len(packed.keep) == len(packed.targets) == len(packed.responses) == len(packed.index) == 0
