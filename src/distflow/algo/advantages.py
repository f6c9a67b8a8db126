"""Advantages from the scores of a group: the responses to one prompt."""

from math import comb
from typing import Literal, get_args

import torch
from torch import Tensor

from distflow.algo.options import Baseline, BestOfBaseline, Scale
from distflow.errors import ConfigError, DataError, suggest


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    scale: Scale = "std",
    baseline: Baseline = "mean",
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Returns (score − baseline of the group) × scale for each sample: [n], in the dtype of `scores` [n].

    `groups` [n] are any integers; equal ones are one group, in any order. If all scores of a group are equal, as in a
    group of one, the advantage is exactly 0.

    - baseline: the `mean` of the group (GRPO), that of the other samples (`leave_one_out`, RLOO), or the mean weighted
      by the `lengths` of the responses, which minimises variance (`length_weighted`, OPO)
    - scale: division by the standard deviation (n − 1) of the group (`std`, GRPO) or of all samples (`batch`,
      REINFORCE++), or by the mean of the group's scores (`mean`, MaxRL, for scores that are never negative; 0 for a
      group whose mean is not above 0), no scaling (`none`, Dr. GRPO), or groups / groups with different scores
      (`nonzero_std`, GPG)
    """
    for name, value, kind in (("scale", scale, Scale), ("baseline", baseline, Baseline)):
        if value not in get_args(kind):
            raise ConfigError(f"unknown {name} of advantages '{value}'{suggest(value, get_args(kind))}")
    if not eps > 0:
        raise ConfigError(f"eps of advantages is {eps}; it must be above 0, or equal scores would be divided by 0")
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)  # [n], [groups]
    values, centred = _above_lowest_and_mean(scores, group, sizes)
    advantages: Tensor
    if baseline == "leave_one_out":
        advantages = centred * (sizes.double() / (sizes - 1).clamp(min=1))[group]
    elif baseline == "length_weighted":
        if lengths is None:
            raise ConfigError("the baseline 'length_weighted' of advantages needs the lengths of the responses")
        # If all responses are empty, no token has a loss.
        total = _per_group(lengths.double(), group, len(sizes), "sum").clamp(min=1)
        advantages = values - (_per_group(values * lengths, group, len(sizes), "sum") / total)[group]
    else:
        advantages = centred
    if scale == "none" or not len(sizes):
        return advantages.to(dtype)
    if scale == "batch":
        return (advantages / (advantages.std(correction=min(1, len(advantages) - 1)) + eps)).to(dtype)
    if scale == "nonzero_std":
        highest = _per_group(values, group, len(sizes), "amax")  # the lowest is 0
        return (advantages * len(sizes) / int((highest > 0).sum().clamp(min=1))).to(dtype)
    if scale == "mean":
        mean = (_per_group(scores.double(), group, len(sizes), "sum") / sizes)[group]
        return torch.where(mean > 0, advantages / mean, 0.0).to(dtype)
    return (advantages / (_std(centred, group, sizes) + eps)[group]).to(dtype)


def best_of_k_advantages(
    scores: Tensor, groups: Tensor, k: int, baseline: BestOfBaseline = "without", eps: float = 1e-6
) -> Tensor:
    """Returns what each sample [n] adds to the best score of k responses of its group, drawn without replacement: [n].

    It is the mean, over the choices of k that have the sample, of the best score less a baseline: the best of the
    choice `without` the sample (its mean is the unbiased gradient of max@k, arXiv 2505.15201), or the `mean` best of
    all choices, divided by their standard deviation (pass@k training, arXiv 2508.10751). Equal scores give exactly 0.
    A group with fewer than k samples has one choice: all of them. With k = 1 nothing is left without the sample: the
    baseline `without` is then the mean of the others.
    """
    if k < 1:
        raise ConfigError(f"advantages of the best of k have k = {k}; it must be 1 or more")
    if baseline not in get_args(BestOfBaseline):
        raise ConfigError(f"unknown baseline of advantages '{baseline}'{suggest(baseline, get_args(BestOfBaseline))}")
    if k == 1 and baseline == "without":
        return group_advantages(scores, groups, "none", "leave_one_out")
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    result = torch.zeros(len(scores), dtype=torch.float64)
    for group in groups.unique().tolist():
        members = (groups == group).nonzero()[:, 0]
        values, order = scores[members].double().sort()
        values = values - values[-1]  # if all choices have the same best, their mean is exactly 0
        n, chosen = len(values), min(k, len(values))
        if n == 1:
            continue
        own, above, best = _best_of_weights(n, chosen)
        if baseline == "without":
            # The lower ones that may be the best of the rest: Σ_{j<i} C(j, k − 2) (v_i − v_j) / C(n − 1, k − 1).
            share = torch.tensor([comb(j, chosen - 2) / comb(n - 1, chosen - 1) for j in range(n)], dtype=torch.float64)
            below = values * share.cumsum(0) - (share * values).cumsum(0)
            result[members[order]] = below
            continue
        mean = (best * values).sum()
        deviation = (best * (values - mean).square()).sum().sqrt()
        with_it = own * values + (above * values).flip(0).cumsum(0).flip(0) - above * values
        result[members[order]] = torch.where(deviation > 0, (with_it - mean) / (deviation + eps), 0.0)
    return result.to(dtype)


def _best_of_weights(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for the i-th lowest of n: its share of the choices of k with it in which it is the best; its share of
    the choices with a given lower one in which it is the best; its share of all choices in which it is the best."""
    own = [comb(i, k - 1) / comb(n - 1, k - 1) for i in range(n)]
    above = [comb(i - 1, k - 2) / comb(n - 1, k - 1) if i and k > 1 else 0.0 for i in range(n)]
    best = [comb(i, k - 1) / comb(n, k) for i in range(n)]
    own_share, above_share, best_share = torch.tensor([own, above, best], dtype=torch.float64)
    return own_share, above_share, best_share


def summed_advantages(scores: Tensor, weights: Tensor, groups: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalises each of several rewards in its group, then adds them up: [n, rewards], [rewards] -> [n].

    The sum is divided by its standard deviation over the batch (GDPO, arXiv 2601.05242). So a reward with a small range
    counts as much as another. NaN is for a reward that does not apply to a sample: it adds 0 and is in no mean.
    """
    if scores.ndim != 2 or weights.shape != scores.shape[1:]:
        raise DataError(
            f"scores {list(scores.shape)} and weights {list(weights.shape)} are not [n, rewards], [rewards]"
        )
    total = torch.zeros(len(scores), dtype=torch.float64)
    for values, weight in zip(scores.double().unbind(1), weights.tolist(), strict=True):
        known = ~values.isnan()
        total[known] += weight * group_advantages(values[known], groups[known], eps=eps)
    if not len(total) or bool((total == total[0]).all()):
        return torch.zeros_like(total).to(scores.dtype)
    return ((total - total.mean()) / (total.std() + eps)).to(scores.dtype)


def mean_group_std(scores: Tensor, groups: Tensor) -> float:
    """Returns the mean over groups of the standard deviation (n − 1) of their scores; 0 without groups."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    _, centred = _above_lowest_and_mean(scores, group, sizes)
    return float(_std(centred, group, sizes).mean()) if len(sizes) else 0.0


def zero_std_fraction(scores: Tensor, groups: Tensor) -> float:
    """Returns the fraction of groups whose scores are all equal, as in a group of one; 0 without groups."""
    ids, group = torch.unique(groups, return_inverse=True)
    if not len(ids):
        return 0.0
    values = scores.double()
    equal = _per_group(values, group, len(ids), "amin") == _per_group(values, group, len(ids), "amax")  # [groups]
    return float(equal.double().mean())


def _above_lowest_and_mean(scores: Tensor, group: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how far each score [n] is above the lowest of its group, and above the mean; in float64."""
    values = scores.double()
    # Measured from the lowest, equal scores are exactly 0, and so is their mean; a rounded mean would leave residues.
    values = values - _per_group(values, group, len(sizes), "amin")[group]
    mean: Tensor = _per_group(values, group, len(sizes), "sum") / sizes  # [groups]
    return values, values - mean[group]


def _std(centred: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """Returns the standard deviation of each group: [groups]."""
    return (_per_group(centred.square(), group, len(sizes), "sum") / (sizes - 1).clamp(min=1)).sqrt()


def _per_group(values: Tensor, group: Tensor, groups: int, reduce: Literal["sum", "amin", "amax"]) -> Tensor:
    """Reduces the values of each group: [n] -> [groups]."""
    return values.new_zeros(groups).scatter_reduce(0, group, values, reduce, include_self=False)
