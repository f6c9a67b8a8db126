"""Masks of tokens and responses whose policy term is left out of a loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from distflow.algo.kl import log_ratio
from distflow.algo.losses import MAX_SUMMAND
from distflow.algo.tokens import Tokens
from distflow.errors import ConfigError

_BITS = (20, 8, 0)  # of a float32, from the highest: 12, 12 and 8 of them are told apart in a round


@torch.no_grad()
def off_policy_mask(tokens: Tokens, threshold: float) -> Tensor:
    """Returns 0 for the tokens of responses with a negative advantage that the policy has left behind, else 1.

    It has left one behind if the mean of old less new log-probs is above `threshold` (off-policy sequence masking of
    DeepSeek-V3.2).
    An unlikely token need not be made less likely.
    """
    if not threshold >= 0:
        raise ConfigError(f"mask_off_policy is {threshold}; it must be 0 or more")
    if "old_logprobs" not in tokens:
        return torch.ones_like(tokens.logprobs)  # on-policy
    x = log_ratio(tokens["old_logprobs"].double(), tokens.logprobs.double()).clamp(-MAX_SUMMAND, MAX_SUMMAND)
    mean = tokens.expand(tokens.sum_per_sample(x) / tokens.lengths.clamp(min=1))
    return 1 - ((mean > threshold) & (tokens["advantage"] < 0)).to(tokens.logprobs.dtype)


def covariance_mask(
    logprobs: Tensor,
    advantage: Tensor,
    share: float,
    add_up: Callable[[Tensor], Tensor],
    noise: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Returns whether a token is of the `share` whose log-prob and advantage covary most (arXiv 2505.22617): [n] bool.

    The covariance of a token is (log-prob − mean) · (advantage − mean), of means over all workers' tokens; only one
    within `bounds` counts. With `noise` [n] above 0, tokens are drawn by it instead: as many, within the bounds.
    `add_up` sums over all workers.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of tokens by their covariance is {share}; it must be above 0, and at most 1")
    x, a = logprobs.double(), advantage.double()
    count, *sums = add_up(torch.stack((x.new_tensor(len(x)), x.sum(), a.sum()))).tolist()
    x_mean, a_mean = (total / max(count, 1.0) for total in sums)
    covariance = (x - x_mean) * (a - a_mean)
    within = (covariance > bounds[0]) & (covariance < bounds[1])  # NaN is not
    rank_by = torch.where(within, covariance if noise is None else noise.double(), 0.0).float()
    chosen: Tensor = within & (rank_by >= top_value(rank_by, share, add_up))
    return chosen


def top_value(values: Tensor, fraction: float, add_up: Callable[[Tensor], Tensor]) -> float:
    """Returns the smallest of the `fraction` of all workers' values that are largest; −∞ if there are none.

    `values` [n] float32 are a worker's; none is negative. `add_up` sums counts [m] int64 over all workers. Three
    histograms find the exact value, whatever its worker and however many there are.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"the fraction of tokens is {fraction}; it must be above 0, and at most 1")
    bits = values.float().clamp(min=0).contiguous().view(torch.int32).long()  # in the order of the values
    rank, prefix, above = None, 0, 32
    for low in _BITS:
        inside = bits[(bits >> above) == prefix] if above < 32 else bits
        size = 1 << (above - low)
        counts = add_up(torch.bincount((inside >> low) & (size - 1), minlength=size))
        if rank is None:
            total = int(counts.sum())
            if not total:
                return -float("inf")
            rank = max(1, round(fraction * total))
        from_top = counts.flip(0).cumsum(0)
        place = int((from_top < rank).sum())  # from the top
        rank -= int(from_top[place - 1]) if place else 0
        prefix, above = (prefix << (above - low)) | (size - 1 - place), low
    return float(torch.tensor([prefix], dtype=torch.int32).view(torch.float32))
