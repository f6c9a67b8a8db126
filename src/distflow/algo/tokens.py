"""The interface of losses: they read response tokens with fields and return a value for each token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from distflow.errors import ConfigError, DataError, suggest


class MissingFieldError(ConfigError):
    """A loss asks for a field that its node does not read."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"the loss needs field '{name}', which its node does not read{suggest(name, known)}")
        self.name = name


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probs of a teacher's likeliest tokens at the place of each response token, of student and teacher."""

    student: Tensor  # [tokens, k], carries the gradient
    teacher: Tensor  # [tokens, k]


@dataclass(frozen=True)
class Tokens:
    """The response tokens of some samples, concatenated without padding.

    `tokens["advantage"]` is aligned with the tokens, whether the field has one value per token or per sample. The
    mapping decides, as shapes cannot: there may be as many tokens as samples.
    """

    logprobs: Tensor  # [tokens] under the weights being trained, float32 or wider; carries the gradient
    lengths: Tensor  # [samples] int64, sums to tokens; a length may be 0
    per_token: Mapping[str, Tensor] = field(default_factory=dict)  # [tokens] each
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)  # [samples] each
    entropy: Tensor | None = None  # [tokens], if the loss asked for it; carries the gradient
    top: TopLogprobs | None = None  # if the node reads those of a teacher

    def __post_init__(self) -> None:
        tokens, samples = self.logprobs.shape, self.lengths.shape
        if len(tokens) != 1 or len(samples) != 1:
            raise DataError(f"logprobs {list(tokens)} and lengths {list(samples)} must have one dimension each")
        # On another device the sum would need a synchronisation.
        if self.lengths.device.type == "cpu" and int(self.lengths.sum()) != tokens[0]:
            raise DataError(f"the lengths sum to {int(self.lengths.sum())}, but there are {tokens[0]} tokens")
        for name, values in self.per_token.items():
            if values.shape != tokens:
                raise DataError(f"field '{name}' is {list(values.shape)}; one value per token is {list(tokens)}")
            if name in self.per_sample:
                raise DataError(f"field '{name}' is given both per token and per sample; pass one of them")
        for name, values in self.per_sample.items():
            if values.shape != samples:
                raise DataError(f"field '{name}' is {list(values.shape)}; one value per sample is {list(samples)}")
        if self.entropy is not None and self.entropy.shape != tokens:
            raise DataError(f"entropy is {list(self.entropy.shape)}; one value per token is {list(tokens)}")

    @property
    def values(self) -> Tensor:
        """Returns the outputs of a model with a value head, a critic or a reward model: [tokens]."""
        return self.logprobs

    def __contains__(self, name: str) -> bool:
        return name in self.per_token or name in self.per_sample

    def __getitem__(self, name: str) -> Tensor:
        """Returns a field as [tokens]; a value per sample is repeated for each of its tokens."""
        if name in self.per_token:
            return self.per_token[name]
        if name in self.per_sample:
            return self.expand(self.per_sample[name])
        known = [*self.per_token, *self.per_sample]
        raise MissingFieldError(name, known)

    def expand(self, per_sample: Tensor) -> Tensor:
        """Repeats the value of each sample for its tokens: [samples] -> [tokens]."""
        return per_sample[self.sample_index]

    def sum_per_sample(self, per_token: Tensor) -> Tensor:
        """Sums over the tokens of each sample, differentiably: [tokens] -> [samples], 0 for a sample without tokens."""
        return per_token.new_zeros(len(self.lengths)).index_add(0, self.sample_index, per_token)

    def max_per_sample(self, per_token: Tensor) -> Tensor:
        """Returns the largest value of each sample: [tokens] -> [samples], 0 for a sample without tokens."""
        largest = per_token.new_zeros(len(self.lengths))
        return largest.scatter_reduce(0, self.sample_index, per_token, "amax", include_self=False)

    @cached_property
    def sample_index(self) -> Tensor:
        """Returns the index of the sample that each token belongs to: [tokens] int64."""
        samples = torch.arange(len(self.lengths), device=self.lengths.device)
        # With the size known in advance, no device needs a synchronisation.
        return samples.repeat_interleave(self.lengths, output_size=len(self.logprobs))


@dataclass(frozen=True)
class Loss:
    """A loss per token, which the trainer weighs, sums and differentiates; metrics are only logged."""

    per_token: Tensor  # [tokens]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [tokens] each, detached
    regularizer: Tensor | None = None  # [tokens], the part of `per_token` that is KL and entropy

    def corrected(self, weights: Tensor) -> Tensor:
        """Returns the loss, with its policy term weighed by an off-policy correction: [tokens].

        The regularizer keeps its weight: a token that the correction drops is still held near the reference.
        """
        if self.regularizer is None:
            return weights * self.per_token
        return weights * (self.per_token - self.regularizer) + self.regularizer
