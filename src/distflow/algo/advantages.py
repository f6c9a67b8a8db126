"""Advantages from the scores of a group: the responses to one prompt."""

from typing import Literal, get_args

import torch
from torch import Tensor

from distflow.algo.options import Baseline, Scale
from distflow.errors import ConfigError, suggest


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
      REINFORCE++), no scaling (`none`, Dr. GRPO), or groups / groups with different scores (`nonzero_std`, GPG)
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
    return (advantages / (_std(centred, group, sizes) + eps)[group]).to(dtype)


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
