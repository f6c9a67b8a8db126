"""From losses per token to the loss of a step: a weight for each token.

The counts are those of the whole step, so the weights of a token do not depend on the worker or the micro-batch it
is in: adding up weighted losses, and their gradients, in any split gives the loss of the step.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from distflow.errors import ConfigError, suggest

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Counts:
    """Over all workers and micro-batches of one optimiser step."""

    tokens: int
    samples: int  # those with at least one token
    horizon: int  # the longest response allowed, in tokens


def token_weights(mode: Mode, lengths: Tensor, counts: Counts) -> Tensor:
    """[samples] int64 -> [tokens] float32, such that the loss of the step is Σ weight · loss of the token.

    - token-mean: every token of the step weighs the same, so long responses weigh more
    - seq-mean-token-mean: every response weighs the same, so tokens of long responses weigh less (GRPO)
    - seq-mean-token-sum: the sum over a response, averaged over responses
    - seq-mean-token-sum-norm: that, divided by the horizon, a constant (Dr. GRPO)
    """
    if mode == "seq-mean-token-sum-norm" and counts.tokens and counts.horizon < 1:
        raise ConfigError(f"{mode} divides by the longest response allowed, which is given as {counts.horizon}")
    # Where a count is 0 there are no tokens to weigh; 1 in its place keeps the division defined.
    tokens, samples, horizon = (max(n, 1) for n in (counts.tokens, counts.samples, counts.horizon))
    own = lengths.repeat_interleave(lengths).double()  # [tokens]: how many tokens the sample of each has, never 0
    match mode:
        case "token-mean":
            weights = torch.full_like(own, 1 / tokens)
        case "seq-mean-token-mean":
            weights = 1 / (samples * own)
        case "seq-mean-token-sum":
            weights = torch.full_like(own, 1 / samples)
        case "seq-mean-token-sum-norm":
            weights = torch.full_like(own, 1 / (samples * horizon))
        case _:
            raise ConfigError(f"unknown way to aggregate a loss '{mode}'{suggest(mode, get_args(Mode))}")
    return weights.float()
