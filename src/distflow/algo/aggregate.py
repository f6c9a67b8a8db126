"""Loss aggregation: the weight of each token in the loss of an update.

The counts are over all workers, so the weight of a token does not depend on its worker or micro-batch: the sum of
weighted losses, and of their gradients, is the same in any split.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from distflow.algo.options import Aggregation
from distflow.errors import ConfigError, suggest


@dataclass(frozen=True)
class Counts:
    """Counts over all workers and micro-batches of one update."""

    tokens: int
    samples: int  # with at least one token; or branches of samples
    horizon: int  # the longest response allowed, in tokens


def token_weights(mode: Aggregation, lengths: Tensor, counts: Counts, own_tokens: int | None = None) -> Tensor:
    """Returns weights such that the loss of the update is Σ weight · token loss: [samples] int64 -> [tokens] float32.

    `own_tokens`: the sum of `lengths`; a device that has to find it by itself is waited for.
    With `aggregate_by: branch` each branch of a sample is what is called a response here.

    - token-mean: every token weighs the same, so long responses weigh more
    - seq-mean-token-mean: every response weighs the same, so tokens of long responses weigh less (GRPO)
    - seq-mean-token-sum: the sum over a response, averaged over responses
    - seq-mean-token-sum-norm: the same divided by the horizon, a constant (Dr. GRPO)
    """
    if mode == "seq-mean-token-sum-norm" and counts.tokens and counts.horizon < 1:
        raise ConfigError(
            f"{mode} divides by the longest response allowed, which is {counts.horizon}; set rollout.max_tokens"
        )
    # A count of 0 means that there are no tokens; 1 in its place keeps the division defined.
    tokens, samples, horizon = (max(n, 1) for n in (counts.tokens, counts.samples, counts.horizon))
    own_length = lengths.repeat_interleave(lengths, output_size=own_tokens).double()  # [tokens], never 0
    match mode:
        case "token-mean":
            weights = torch.full_like(own_length, 1 / tokens)
        case "seq-mean-token-mean":
            weights = 1 / (samples * own_length)
        case "seq-mean-token-sum":
            weights = torch.full_like(own_length, 1 / samples)
        case "seq-mean-token-sum-norm":
            weights = torch.full_like(own_length, 1 / (samples * horizon))
        case _:
            raise ConfigError(f"unknown loss aggregation '{mode}'{suggest(mode, get_args(Aggregation))}")
    return weights.float()
