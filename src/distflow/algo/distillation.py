"""Divergences of a student from a teacher, of whose distributions only the teacher's likeliest tokens are known.

All other tokens count as one, with what is left of the probability. So the divergence is exact for as many tokens as
the vocabulary has, and otherwise a lower bound of it that is 0 only where both agree on these tokens.
"""

import math
from typing import get_args

import torch
from torch import Tensor

from distflow.algo.options import Divergence
from distflow.errors import ConfigError, suggest

_LEAST = 1e-7  # probability of the rest, below which its logarithm is noise


def divergence(kind: Divergence, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Returns the divergence at each place from log-probs of the same tokens: [n, k], [n, k] -> [n].

    `forward` is KL(teacher‖student), `reverse` KL(student‖teacher). `jensen_shannon` is, with the mixture
    M = beta · teacher + (1 − beta) · student, beta · KL(teacher‖M) + (1 − beta) · KL(student‖M) (arXiv 2306.13649).
    """
    if kind not in get_args(Divergence):
        raise ConfigError(f"unknown divergence '{kind}'{suggest(kind, get_args(Divergence))}")
    ours, theirs = _with_rest(student), _with_rest(teacher.to(student.dtype))
    if kind == "forward":
        return _kl(theirs, ours)
    if kind == "reverse":
        return _kl(ours, theirs)
    if not 0 < beta < 1:
        raise ConfigError(f"the Jensen-Shannon divergence has beta = {beta}; it must be between 0 and 1")
    mixture = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    return beta * _kl(theirs, mixture) + (1 - beta) * _kl(ours, mixture)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the log-prob of all other tokens: [n, k] -> [n, k + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST).log()
    return torch.cat((logprobs, rest), -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
