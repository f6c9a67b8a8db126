"""The token sequences of a sample whose model continued several histories: a tree inside the sample.

A sample stays one row of a batch. Its `response_tokens` hold the tokens of all its sequences once: those of the first
sequence, then for each further one the tokens that it does not share. The optional field `response_branches` says where
each of these begins: an integer tensor [sequences - 1, 3] per sample with

- `start`: its first token in `response_tokens`;
- `parent`: the sequence whose beginning it shares, an earlier one of the sample, counted from 0;
- `shared`: how many tokens it shares with that one, the prompt included; 0 for a history that shares none.

Prompts and messages of further sequences are masked, as those of an environment are (see `response_mask`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distflow.batch.batch import Batch, Ragged
from distflow.batch.response_mask import ModelTokens
from distflow.errors import DataError
from distflow.util.arrays import Ints

BRANCHES = "response_branches"


@dataclass(frozen=True)
class Sequences:
    """The sequences of some samples, sample by sample; each array has a value for each sequence."""

    sample: Ints  # place of its sample in the batch
    start: Ints  # of its own tokens in the response
    length: Ints  # how many own tokens it has
    parent: Ints  # its parent among these sequences; itself for the first one of a sample
    shared: Ints  # tokens before its own: the prompt, or what it shares with its parent

    @property
    def is_first(self) -> NDArray[np.bool_]:
        first: NDArray[np.bool_] = np.diff(self.sample, prepend=-1) != 0
        return first

    @classmethod
    def of(cls, batch: Batch) -> "Sequences":
        """Reads the sequences of a batch, one per sample if it has no field `response_branches`."""
        prompts, responses = batch["prompt_tokens"].lengths, batch["response_tokens"].lengths
        samples = np.arange(len(batch))
        if BRANCHES not in batch or not len(batch):
            return cls(samples, 0 * samples, responses, samples, prompts)
        column: Ragged = batch[BRANCHES]
        further = column.joined().reshape(-1, 3).numpy().astype(np.int64)
        counts = column.lengths + 1
        first = np.cumsum(counts) - counts
        is_first = np.zeros(int(counts.sum()), bool)
        is_first[first] = True
        sample = np.repeat(samples, counts)
        start, shared = np.zeros(len(sample), np.int64), prompts[sample]
        parent = np.arange(len(sample))
        start[~is_first], shared[~is_first] = further[:, 0], further[:, 2]
        parent[~is_first] = further[:, 1] + first[sample[~is_first]]
        end = np.append(start[1:], 0)
        end[first + counts - 1] = responses
        result = cls(sample, start, end - start, parent, shared)
        result._check(batch, first)
        return result

    def model_tokens(self, model: ModelTokens) -> Ints:
        """Returns how many tokens of its own the model sampled in each sequence."""
        if self.is_first.all():
            return model.lengths
        return ModelTokens(self.length, model.mask).lengths

    def _check(self, batch: Batch, first: Ints) -> None:
        """Raises a DataError that names the sample and its sequence."""
        number = np.arange(len(self.parent))
        further = ~self.is_first
        has_several = further | np.append(further[1:], False)
        self._refuse(batch, first, has_several & (self.length < 1), "has no tokens of its own")
        wrong = further & ((self.parent >= number) | (self.parent < first[self.sample]))
        self._refuse(batch, first, wrong, "has a parent that is not an earlier one of the sample")
        size = self.shared + self.length
        wrong = further & ((self.shared < 0) | (self.shared > size[self.parent]))
        self._refuse(batch, first, wrong, "shares more tokens with its parent than that one has")
        mask = ModelTokens.of(batch).mask
        ends = np.cumsum(batch["response_tokens"].lengths)
        begins = (ends - batch["response_tokens"].lengths)[self.sample] + self.start
        new = np.flatnonzero(further & (self.shared == 0))
        sampled = np.zeros(len(number), bool)
        sampled[new] = True if mask is None else mask.numpy()[begins[new]]
        self._refuse(batch, first, sampled, "shares nothing and begins with a token that the model sampled")

    def _refuse(self, batch: Batch, first: Ints, wrong: NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            sample = int(self.sample[i])
            raise DataError(
                f"sample {int(batch.ids[sample])}: sequence {i - int(first[sample])} of its '{BRANCHES}' {what}"
            )


def branches_column(rows: Sequence[Sequence[tuple[int, int, int]]]) -> Ragged:
    """Returns the field from (start, parent, shared) of the further sequences of each sample."""
    values = torch.tensor([number for row in rows for branch in row for number in branch], dtype=torch.int64)
    return Ragged.packed(values, np.array([len(row) for row in rows], np.int64), (3,))
