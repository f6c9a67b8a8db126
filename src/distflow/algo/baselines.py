"""Baselines that are no mean of a group: of each token, and of each role over time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from distflow.errors import ConfigError, DataError


def optimal_token_advantages(returns: Tensor, energy: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """Returns the return of each token less the baseline of its place, which minimises variance: [tokens].

    The baseline of the t-th token of the responses of a group is the mean of their returns there, weighed by the energy
    of all tokens up to it (arXiv 2602.07078). `energy` [tokens] is that of each token, ‖1 − π‖² of its distribution;
    `lengths` and `groups` are [samples]. Equal returns, as at a place that one response of the group has, give 0.
    """
    tokens = int(lengths.sum())
    if returns.shape != (tokens,) or energy.shape != (tokens,):
        raise DataError(
            f"returns {list(returns.shape)} and energy {list(energy.shape)} are not one per token of {tokens}"
        )
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(tokens) - (lengths.cumsum(0) - lengths)[sample]
    _, of_place = torch.unique(torch.stack((groups[sample], place)), dim=1, return_inverse=True)
    total = energy.double().cumsum(0)
    weight = total - (total - energy.double())[(lengths.cumsum(0) - lengths)[sample]] if tokens else total
    size = int(of_place.max()) + 1 if tokens else 0

    def add_up(values: Tensor) -> Tensor:
        return values.new_zeros(size).index_add(0, of_place, values)

    # Measured from the lowest, equal returns are exactly 0, and so is their mean; a rounded mean would leave residues.
    values = returns.double()
    low = values.new_zeros(size).scatter_reduce(0, of_place, values, "amin", include_self=False)
    above = values - low[of_place]
    # Where the policy was certain of all tokens, none has a weight: then all weigh the same.
    weight = torch.where((add_up(weight) > 0)[of_place], weight, 1.0)
    return (above - (add_up(weight * above) / add_up(weight))[of_place]).to(returns.dtype)


def role_advantages(
    scores: Tensor, roles: Sequence[str], baselines: Mapping[str, float], decay: float
) -> tuple[Tensor, dict[str, float]]:
    """Returns the score of each sample [n] less the baseline of its role, and the baselines of the next step (RAE).

    A baseline is a moving average of the role's scores, 0 at first (arXiv 2506.24119). No sample is in its own:
    baselines are those of before, and then take up the scores in their order.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"the decay of the baselines is {decay}; it must be 0 or more, and below 1")
    if len(roles) != len(scores):
        raise DataError(f"there are {len(scores)} scores and {len(roles)} roles")
    before = torch.tensor([baselines.get(role, 0.0) for role in roles], dtype=torch.float64)
    after = dict(baselines)
    for role, score in zip(roles, scores.tolist(), strict=True):
        after[role] = decay * after.get(role, 0.0) + (1 - decay) * score
    return (scores.double() - before).to(scores.dtype), after
