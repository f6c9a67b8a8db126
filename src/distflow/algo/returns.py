"""Token rewards, returns, generalised advantage estimation, and whitening, of responses packed without padding.

`lengths` [samples] int64 are the tokens of each response; a length may be 0. Everything is computed in float64 and
returned in the dtype of the input.
"""

import sys

import torch
from torch import Tensor

from distflow.errors import ConfigError, DataError


def token_rewards(scores: Tensor, lengths: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Puts the score [samples] at the last token of each response, less a `penalty` [tokens]: [tokens].

    The penalty is a KL divergence times its weight. The score of an empty response is dropped.
    """
    if scores.shape != lengths.shape:
        raise DataError(f"scores {list(scores.shape)} and lengths {list(lengths.shape)} are not one per sample each")
    ends = lengths.cumsum(0)
    rewards = torch.zeros(int(lengths.sum()), dtype=_float_dtype(scores), device=scores.device)
    nonempty = lengths > 0
    rewards[ends[nonempty] - 1] = scores[nonempty].to(rewards.dtype)
    if penalty is None:
        return rewards
    _check_size("penalties", penalty, lengths)
    return (rewards.double() - penalty.double()).to(rewards.dtype)


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns [tokens] by generalised advantage estimation (arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t, with a value of 0 after the last token; A_t = δ_t + γλ A_{t+1}; returns are A + V.
    """
    _check_size("rewards", rewards, lengths)
    _check_size("values", values, lengths)
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    remaining = _remaining(lengths)
    current = values.double()
    following = torch.where(remaining > 0, current.roll(-1), 0.0)
    advantages = _discounted_sum(rewards.double() + gamma * following - current, remaining, gamma * lam)
    dtype = _float_dtype(values)
    return advantages.to(dtype), (advantages + current).to(dtype)


def discounted_returns(rewards: Tensor, lengths: Tensor, gamma: float = 1.0) -> Tensor:
    """Returns Σ_{s ≥ t} γ^(s − t) r_s for each token: [tokens]. It is `gae` with values 0 and lam 1."""
    _check_size("rewards", rewards, lengths)
    _check_fraction("gamma", gamma)
    return _discounted_sum(rewards.double(), _remaining(lengths), gamma).to(_float_dtype(rewards))


def moments(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns count, mean, and sum of squares about that mean, of each response: [tokens] -> [samples, 3] float64.

    Plain sums of squares would lose a small variance beside a large mean. `merge_moments` combines the rows.
    """
    _check_size("values", values, lengths)
    sample = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    count = lengths.double()

    def sum_per_sample(per_token: Tensor) -> Tensor:
        return per_token.new_zeros(len(lengths)).index_add(0, sample, per_token)

    exact = values.double()
    # Measured from the lowest, equal values are exactly 0, and so is their mean; a rounded mean would leave residues.
    low = exact.new_zeros(len(lengths)).scatter_reduce(0, sample, exact, "amin", include_self=False)
    mean = low + sum_per_sample(exact - low[sample]) / count.clamp(min=1)
    return torch.stack((count, mean, sum_per_sample((exact - mean[sample]).square())), 1)


def merge_moments(parts: Tensor) -> Tensor:
    """Merges moments [any, 3] into the moments of all values [3], with the same bits in any order; 0 without any."""
    count, mean, squares = parts[parts[:, 0] > 0].unbind(1)
    if not len(count):
        return parts.new_zeros(3)
    low = mean.min()
    total_mean = low + _sorted_sum(count * (mean - low)) / count.sum()
    return torch.stack((count.sum(), total_mean, _sorted_sum(squares + count * (mean - total_mean).square())))


def whiten(values: Tensor, parts: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns (value − mean) / (standard deviation (n − 1) + eps), where `parts` are the `moments` of the whole step.

    `values` [tokens] may be any part of the step. If the step has a single token, or all its values are equal, the
    result is exactly 0.
    """
    if not eps > 0:
        raise ConfigError(f"eps of whitening is {eps}; it must be above 0, or equal values would be divided by 0")
    count, mean, squares = merge_moments(parts).unbind()
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return ((values.double() - mean) / (deviation + eps)).to(_float_dtype(values))


def explained_variance(returns: Tensor, errors: Tensor) -> float:
    """Returns 1 − variance of (returns − values) / variance of returns, from `moments` [any, 3] of each.

    1 is a perfect critic. It is 0 if the returns have no variance, or so little that the quotient is out of range.
    """
    total, unexplained = float(merge_moments(returns)[2]), float(merge_moments(errors)[2])
    if total == 0 or total * sys.float_info.max <= unexplained:
        return 0.0
    return 1 - unexplained / total


def _discounted_sum(values: Tensor, remaining: Tensor, decay: float) -> Tensor:
    """Returns Σ_{s ≥ t} decay^(s − t) values_s over the rest of the response: [tokens].

    Every iteration doubles the tokens that are summed, so there are log2 of the longest response of them.
    """
    reach, longest = 1, int(remaining.max()) if len(remaining) else 0
    while reach <= longest and decay**reach > 0:
        following = torch.where(remaining >= reach, values.roll(-reach), 0.0)
        values = values + decay**reach * following
        reach *= 2
    return values


def _remaining(lengths: Tensor) -> Tensor:
    """Returns the number of later tokens of the same response, for each token: [tokens]."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return ends - 1 - torch.arange(len(ends), device=lengths.device)


def _sorted_sum(values: Tensor) -> Tensor:
    """Sums in sorted order, so that the order of the values does not change the rounding."""
    return values.sort().values.sum()


def _float_dtype(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()


def _check_size(name: str, per_token: Tensor, lengths: Tensor) -> None:
    if per_token.shape != (int(lengths.sum()),):
        raise DataError(f"{name} are {list(per_token.shape)}, but the lengths sum to {int(lengths.sum())} tokens")


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} of the returns is {value}; it must be within 0 … 1")
