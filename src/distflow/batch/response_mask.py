"""The mask of the response tokens that the model sampled; the others came from an environment.

The optional field `response_mask` has 1 for each token of a response that the model sampled, and 0 for
context. All other fields of tokens are aligned with `response_tokens`; their values for context are not read.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from distflow.batch.batch import Batch, Ragged
from distflow.errors import DataError
from distflow.util.arrays import Ints

MASK = "response_mask"


@dataclass(frozen=True)
class ModelTokens:
    """The tokens of some responses that the model sampled."""

    response_lengths: Ints  # [samples]
    mask: Tensor | None = None  # [tokens of the responses] bool; None: all are the model's

    @classmethod
    def of(cls, batch: Batch, field: str = "response_tokens") -> "ModelTokens":
        """Reads the mask of a batch, if it has one; `field` is any field with a value for each token."""
        lengths: Ints = batch[field].lengths
        if MASK not in batch:
            return cls(lengths)
        column: Ragged = batch[MASK]
        if len(wrong := np.flatnonzero(column.lengths != lengths)):
            i = int(wrong[0])
            raise DataError(
                f"sample {int(batch.ids[i])}: '{MASK}' has {int(column.lengths[i])} values for a response of"
                f" {int(lengths[i])} tokens; it must have one for each"
            )
        values = column.joined()
        if not bool(((values == 0) | (values == 1)).all()):
            raise DataError(f"'{MASK}' must be 1 for tokens that the model sampled and 0 for all others")
        return cls(lengths, values.bool())

    @cached_property
    def lengths(self) -> Ints:
        """Returns the number of model tokens of each response: [samples]."""
        if self.mask is None:
            return self.response_lengths
        before = np.concatenate(([0], np.cumsum(self.mask.numpy())))  # of each token, and after the last
        ends = np.cumsum(self.response_lengths)
        counts: Ints = before[ends] - before[ends - self.response_lengths]
        return counts

    def select(self, per_token: Tensor) -> Tensor:
        """Returns the values of the model's tokens: [tokens of the responses] -> [model tokens]."""
        return per_token if self.mask is None else per_token[self.mask]

    def spread(self, values: Tensor) -> Ragged:
        """Returns a column for whole responses from the values of the model's tokens; it has 0 for the others."""
        if self.mask is not None:
            whole = values.new_zeros(len(self.mask), *values.shape[1:])
            whole[self.mask.to(values.device)] = values
            values = whole
        return Ragged.packed(values, self.response_lengths, tuple(values.shape[1:]))


def model_token_counts(batch: Batch) -> Tensor:
    """Returns the number of model tokens of each response: [samples] int64."""
    return torch.from_numpy(ModelTokens.of(batch).lengths)
