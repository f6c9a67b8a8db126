"""Rewards of tokens, what follows from them, and whitening: over responses of any length, packed without padding.

`lengths` [samples] int64 says how many of the [tokens] belong to each response; it may be 0. Everything is computed in
float64 and given back in the dtype it came in.
"""

import torch
from torch import Tensor

from distflow.errors import ConfigError, DataError


def token_rewards(scores: Tensor, lengths: Tensor, penalty: Tensor | None = None) -> Tensor:
    """[tokens] in the dtype of scores: the score [samples] at the last token, less the `penalty` [tokens] of each.

    The penalty is a divergence from the reference times its weight. The score of an empty response is at no token.
    """
    if scores.shape != lengths.shape:
        raise DataError(f"scores {list(scores.shape)} and lengths {list(lengths.shape)} are not one per sample each")
    ends = lengths.cumsum(0)
    rewards = torch.zeros(int(lengths.sum()), dtype=_float(scores), device=scores.device)
    some = lengths > 0
    rewards[ends[some] - 1] = scores[some].to(rewards.dtype)
    if penalty is None:
        return rewards
    _check("penalties", penalty, lengths)
    return (rewards.double() - penalty.double()).to(rewards.dtype)


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [tokens] in the dtype of values: generalised advantage estimation (arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t with nothing to come after the last token; A_t = δ_t + γλ A_{t+1}; returns are A + V.
    """
    _check("rewards", rewards, lengths)
    _check("values", values, lengths)
    _share("gamma", gamma)
    _share("lam", lam)
    left = _left(lengths)
    known = values.double()
    ahead = torch.where(left > 0, known.roll(-1), 0.0)
    advantages = _discounted(rewards.double() + gamma * ahead - known, left, gamma * lam)
    dtype = _float(values)
    return advantages.to(dtype), (advantages + known).to(dtype)


def discounted_returns(rewards: Tensor, lengths: Tensor, gamma: float = 1.0) -> Tensor:
    """Σ_{s ≥ t} γ^(s − t) r_s [tokens] in the dtype of rewards: REINFORCE++. What `gae` gives with values 0, lam 1."""
    _check("rewards", rewards, lengths)
    _share("gamma", gamma)
    return _discounted(rewards.double(), _left(lengths), gamma).to(_float(rewards))


def moments(values: Tensor, lengths: Tensor) -> Tensor:
    """[tokens] -> [samples, 3] float64: of each response the count, the mean, and the sum of squares about that mean.

    Sums of plain squares would drown a small spread beside a large mean. `merged` makes one row of many.
    """
    _check("values", values, lengths)
    sample = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    count = lengths.double()

    def per_sample(what: Tensor) -> Tensor:
        return what.new_zeros(len(lengths)).index_add(0, sample, what)

    known = values.double()
    # Measured from the lowest, equal values are exactly 0, and so is their mean; a rounded mean would leave crumbs.
    low = known.new_zeros(len(lengths)).scatter_reduce(0, sample, known, "amin", include_self=False)
    mean = low + per_sample(known - low[sample]) / count.clamp(min=1)
    return torch.stack((count, mean, per_sample((known - mean[sample]).square())), 1)


def merged(parts: Tensor) -> Tensor:
    """[any, 3] -> [3]: moments of all together. The order of the parts changes not a bit; without any it is 0."""
    count, mean, squares = parts[parts[:, 0] > 0].unbind(1)
    if not len(count):
        return parts.new_zeros(3)
    low = mean.min()
    whole = low + _sum(count * (mean - low)) / count.sum()
    return torch.stack((count.sum(), whole, _sum(squares + count * (mean - whole).square())))


def whiten(values: Tensor, parts: Tensor, eps: float = 1e-6) -> Tensor:
    """[tokens]: (value − mean) / (standard deviation (n − 1) + eps), both of `parts`: `moments` of the whole step.

    So it does not matter which of the step's responses are given here. Of a single token, or where all values of the
    step are equal, it is exactly 0.
    """
    if not eps > 0:
        raise ConfigError(f"eps of whitening is {eps}; it must be above 0, or equal values would be divided by 0")
    count, mean, squares = merged(parts).unbind()
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return ((values.double() - mean) / (deviation + eps)).to(_float(values))


def explained_variance(returns: Tensor, errors: Tensor) -> float:
    """1 − variance of (returns − values) / variance of returns, from `moments` [any, 3] of each; 1 is a perfect critic.

    0 where the returns have no variance: there is nothing to explain.
    """
    total, unexplained = float(merged(returns)[2]), float(merged(errors)[2])
    return 1 - unexplained / total if total > 0 else 0.0


def _discounted(values: Tensor, left: Tensor, decay: float) -> Tensor:
    """Σ_{s ≥ t} decay^(s − t) values_s over the rest of the response: [tokens].

    Every round doubles how far ahead a token has summed, so the longest response takes log2 of its length rounds.
    """
    reach, longest = 1, int(left.max()) if len(left) else 0
    while reach <= longest and decay**reach > 0:
        ahead = torch.where(left >= reach, values.roll(-reach), 0.0)
        values = values + decay**reach * ahead
        reach *= 2
    return values


def _left(lengths: Tensor) -> Tensor:
    """[tokens]: how many tokens of the response come after each."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return ends - 1 - torch.arange(len(ends), device=lengths.device)


def _sum(values: Tensor) -> Tensor:
    """In one order whatever order they come in."""
    return values.sort().values.sum()


def _float(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()


def _check(name: str, per_token: Tensor, lengths: Tensor) -> None:
    if per_token.shape != (int(lengths.sum()),):
        raise DataError(f"{name} are {list(per_token.shape)}, but the lengths sum to {int(lengths.sum())} tokens")


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} of the returns is {value}; it must be within 0 … 1")
