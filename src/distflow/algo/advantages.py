"""Advantages from scores, by comparing the samples of one group: the responses to one prompt."""

from typing import Literal, get_args

import torch
from torch import Tensor

from distflow.errors import ConfigError, suggest

Scale = Literal["std", "none", "batch", "informative"]
Baseline = Literal["mean", "others", "length"]


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    scale: Scale = "std",
    baseline: Baseline = "mean",
    lengths: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """How much better than its group a sample is; GRPO: than the mean, in standard deviations (n − 1) of the group.

    `scores` [n] and `groups` [n] (any integers; equal means same group, in any order) -> [n] in the dtype of scores.
    `scale="none"` leaves out the division (Dr. GRPO); `batch` divides by the standard deviation over all samples given
    (REINFORCE++); `informative` multiplies by groups / groups that teach something (GPG). `baseline` is the mean of the
    group, that of the `others` (RLOO), or the mean weighted by the `lengths` of the responses, which has the least
    variance (OPO). Where all scores of a group are equal, and so in a group of one, there is nothing to learn: the
    advantage is exactly 0.
    """
    for name, value, kind in (("scale", scale, Scale), ("baseline", baseline, Baseline)):
        if value not in get_args(kind):
            raise ConfigError(f"unknown {name} of advantages '{value}'{suggest(value, get_args(kind))}")
    if not eps > 0:
        raise ConfigError(f"eps of advantages is {eps}; it must be above 0, or equal scores would be divided by 0")
    dtype = scores.dtype if scores.is_floating_point() else torch.get_default_dtype()
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)  # [n], [groups]
    values, centred = _from_lowest_and_mean(scores, group, sizes)
    better: Tensor
    if baseline == "others":
        better = centred * (sizes.double() / (sizes - 1).clamp(min=1))[group]
    elif baseline == "length":
        if lengths is None:
            raise ConfigError("the baseline 'length' of advantages needs the lengths of the responses")
        # Where all responses are empty, none of them has a token to learn from.
        total = _per_group(lengths.double(), group, len(sizes), "sum").clamp(min=1)
        better = values - (_per_group(values * lengths, group, len(sizes), "sum") / total)[group]
    else:
        better = centred
    if scale == "none" or not len(sizes):
        return better.to(dtype)
    if scale == "batch":
        return (better / (better.std(correction=min(1, len(better) - 1)) + eps)).to(dtype)
    if scale == "informative":
        highest = _per_group(values, group, len(sizes), "amax")  # the lowest is 0
        return (better * len(sizes) / int((highest > 0).sum().clamp(min=1))).to(dtype)
    return (better / (_std(centred, group, sizes) + eps)[group]).to(dtype)


def mean_std(scores: Tensor, groups: Tensor) -> float:
    """The standard deviation (n − 1) of a group's scores, in the mean over groups. 0 without groups."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    _, centred = _from_lowest_and_mean(scores, group, sizes)
    return float(_std(centred, group, sizes).mean()) if len(sizes) else 0.0


def zero_std_fraction(scores: Tensor, groups: Tensor) -> float:
    """The fraction of groups whose scores are all equal (a group of one is): they teach nothing. 0 without groups."""
    ids, group = torch.unique(groups, return_inverse=True)
    if not len(ids):
        return 0.0
    values = scores.double()
    equal = _per_group(values, group, len(ids), "amin") == _per_group(values, group, len(ids), "amax")  # [groups]
    return float(equal.double().mean())


def _from_lowest_and_mean(scores: Tensor, group: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """How far each score [n] is above the lowest of its group, and above the mean; in float64."""
    values = scores.double()
    # Measured from the lowest, equal scores are exactly 0, and so is their mean; a rounded mean would leave crumbs.
    values = values - _per_group(values, group, len(sizes), "amin")[group]
    mean: Tensor = _per_group(values, group, len(sizes), "sum") / sizes  # [groups]
    return values, values - mean[group]


def _std(centred: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """[groups]"""
    return (_per_group(centred.square(), group, len(sizes), "sum") / (sizes - 1).clamp(min=1)).sqrt()


def _per_group(values: Tensor, group: Tensor, groups: int, reduce: Literal["sum", "amin", "amax"]) -> Tensor:
    """[n] -> [groups]"""
    return values.new_zeros(groups).scatter_reduce(0, group, values, reduce, include_self=False)
