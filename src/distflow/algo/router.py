"""The load of the experts that a router chooses, and the loss that evens it out."""

import torch
from torch import Tensor


def expert_counts(chosen: Tensor, experts: int) -> Tensor:
    """Returns how many choices are of each expert: [tokens, top-k] -> [experts] float32."""
    ones = torch.ones(chosen.numel(), device=chosen.device)
    return ones.new_zeros(experts).scatter_add(0, chosen.flatten(), ones)


def balance_loss(logits: Tensor, chosen: Tensor, sample: Tensor, lengths: Tensor) -> Tensor:
    """Returns the balance loss of each sample, times its length, from the tokens of all: [samples].

    `logits` are [tokens, experts], `chosen` [tokens, top-k], `sample` is the index of each token's sample. The loss of
    a sample is experts · Σ_e f_e · P_e, with f_e the share of its choices that are of expert e, and P_e the mean of the
    router's probability for it: 1 if all are even (of a sequence, as in arXiv 2412.19437). A loss of the whole batch
    would depend on which samples are computed together.
    """
    samples, experts = len(lengths), logits.shape[1]
    probs = logits.float().softmax(-1)
    total = probs.new_zeros(samples, experts).index_add(0, sample, probs)
    choices = (sample[:, None] * experts + chosen).flatten()
    counts = expert_counts(choices, samples * experts).view(samples, experts)
    shares = counts / (chosen.shape[1] * lengths.clamp(min=1))[:, None]
    return experts * (shares * total).sum(-1)
