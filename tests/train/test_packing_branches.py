"""Samples with several token sequences: each is complete in a pack, and what they share is there once."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.batch.batch import Batch, Column, Ragged
from distflow.batch.branches import branches_column
from distflow.errors import DataError
from distflow.train.packing import Pack, pack

Path = list[tuple[int, bool]]  # tokens, and whether the model sampled them
BUSY = settings(deadline=None)


class Sample:
    """A sample that is written sequence by sequence; `paths` are what training must see."""

    def __init__(self, prompt: list[int], first: Path) -> None:
        self.prompt, self.response = prompt, list(first)
        self.branches: list[tuple[int, int, int]] = []
        self.paths: list[Path] = [[(t, False) for t in prompt] + first]

    def add(self, parent: int, shared: int, own: Path) -> None:
        self.branches.append((len(self.response), parent, shared))
        self.response += own
        self.paths.append(self.paths[parent][:shared] + own)


def batch_of(samples: Sequence[Sample]) -> Batch:
    columns: dict[str, Column] = {
        "prompt_tokens": Ragged.of([torch.tensor(s.prompt) for s in samples]),
        "response_tokens": Ragged.of([torch.tensor([t for t, _ in s.response]) for s in samples]),
        "response_mask": Ragged.of([torch.tensor([m for _, m in s.response], dtype=torch.int8) for s in samples]),
        "old_logprobs": Ragged.of([torch.tensor([-float(t) for t, _ in s.response]) for s in samples]),
        "response_branches": branches_column([s.branches for s in samples]),
    }
    return Batch(np.arange(len(samples)) + 70, np.arange(len(samples)), columns)


@st.composite
def trees(draw: Any) -> list[Sample]:
    """Every token is a number of its own; some samples share a prompt."""
    number = iter(range(1000, 10**6))

    def tokens(at_least: int, model_first: bool) -> Path:
        count = draw(st.integers(at_least, 4))
        sampled = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return [(next(number), m and (model_first or i > 0)) for i, m in enumerate(sampled)]

    samples = []
    for _ in range(draw(st.integers(1, 4))):
        p = draw(st.integers(0, 2))
        sample = Sample([100 * p + i for i in range(1 + 2 * p)], tokens(1, True))
        for k in range(draw(st.integers(0, 4))):
            parent = draw(st.integers(0, k))
            shared = draw(st.integers(0, len(sample.paths[parent])))
            sample.add(parent, shared, tokens(1, shared > 0))
        samples.append(sample)
    return samples


def rows_of(sample: Sample) -> list[list[int]]:
    """The tokens of each sequence, the last one only where another goes on behind it."""
    goes_on = {parent for _, parent, shared in sample.branches if shared == len(sample.paths[parent])}
    paths = [[t for t, _ in path] for path in sample.paths]
    return [path if k in goes_on else path[:-1] for k, path in enumerate(paths)]


def whole(packed: Pack) -> list[list[int]]:
    rows = torch.arange(len(packed.tokens)) if packed.shared is None else packed.shared.rows
    return [part.tolist() for part in packed.tokens[rows].split(packed.lengths)]


@BUSY
@given(trees())
def test_every_sequence_is_complete_and_each_token_is_packed_once(samples: list[Sample]) -> None:
    packed = pack(batch_of(samples), np.arange(len(samples)))
    want = [path for i in packed.index for path in rows_of(samples[i]) if path]
    assert whole(packed) == want
    assert sorted(packed.tokens.tolist()) == sorted({t for path in want for t in path})
    if packed.shared is not None:
        rows = packed.shared.rows
        assert packed.positions[rows].tolist() == [k for path in want for k in range(len(path))]
        assert torch.equal(rows[packed.shared.first_places], torch.arange(len(packed.tokens)))
        own = [set(part) - {t for earlier in want[:k] for t in earlier} for k, part in enumerate(want)]
        assert packed.shared.own == tuple(map(len, own))
        assert all(set(part[len(part) - len(new) :]) == new for part, new in zip(want, own, strict=True))
        places = torch.cat((packed.shared.first_places, packed.shared.repeats))
        assert sorted(places.tolist()) == list(range(len(rows)))


@BUSY
@given(trees())
def test_a_sampled_token_is_predicted_once_by_the_token_before_it_in_its_sequence(samples: list[Sample]) -> None:
    packed = pack(batch_of(samples), np.arange(len(samples)))
    want = []
    for i in packed.index:
        before: dict[int, int] = {}  # of each sampled token; paths that share it agree
        for path in samples[i].paths:
            for (last, _), (token, sampled) in pairwise(path):
                if sampled:
                    assert before.setdefault(token, last) == last
        want += [(before[t], t) for t, sampled in samples[i].response if sampled]
    assert list(zip(packed.tokens[packed.keep].tolist(), packed.targets.tolist(), strict=True)) == want
    assert torch.equal(packed.per_token["old_logprobs"], -packed.targets.float())
    assert packed.responses.tolist() == [sum(m for _, m in samples[i].response) for i in packed.index]
    assert packed.per_token.keys() == {"old_logprobs"}


@BUSY
@given(trees())
def test_a_field_of_branches_without_any_changes_nothing(samples: list[Sample]) -> None:
    plain = [Sample(s.prompt, s.response) for s in samples]
    batch = batch_of(plain)
    without = Batch(batch.ids, batch.groups, {f: c for f, c in batch.columns.items() if f != "response_branches"})
    one, other = pack(batch, np.arange(len(plain))), pack(without, np.arange(len(plain)))
    assert one.lengths == other.lengths
    for name in ("tokens", "positions", "keep", "targets"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("parent", "shared", "own", "message"),
    [
        (0, 3, [], "has no tokens of its own"),
        (1, 3, [(9, True)], "has a parent that is not an earlier one"),
        (-1, 3, [(9, True)], "has a parent that is not an earlier one"),
        (
            0,
            6,
            [(9, True)],
            "shares more tokens with its parent than that one has",
        ),
        (
            0,
            0,
            [(9, True)],
            "shares nothing and begins with a token that the model",
        ),
    ],
)
def test_a_wrong_tree_is_refused_with_its_sample(parent: int, shared: int, own: Path, message: str) -> None:
    sample = Sample([1, 2], [(3, True), (4, False), (5, True)])
    sample.branches.append((3, parent, shared))
    sample.response += own
    with pytest.raises(DataError, match=f"sample 70: sequence 1 of its 'response_branches' {message}"):
        pack(batch_of([sample]), np.arange(1))
