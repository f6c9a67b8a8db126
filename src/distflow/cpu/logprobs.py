"""Log-probs of tokens by the kernels: one function for the sampler and the trainer."""

from types import ModuleType

import torch
from torch import Tensor

from distflow.cpu import as_numpy, in_threads

_COST = 32  # of an element, in multiplications of a product


def token_logprobs(kernels: ModuleType, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each row's target, and the row's entropy."""
    results = torch.empty(2, len(logits))
    arrays = [as_numpy(t) for t in (logits.contiguous(), targets, *results)]

    def part(some: slice) -> None:
        kernels.token_logprobs(*(a[some] for a in arrays))

    in_threads(part, len(logits), _COST * logits.numel())
    return results[0], results[1]


def token_logprobs_backward(kernels: ModuleType, logits: Tensor, targets: Tensor, d: Tensor, d_entropy: Tensor) -> None:
    """Overwrites the logits with the gradient by them."""
    arrays = [as_numpy(t) for t in (logits, targets, d.contiguous(), d_entropy.contiguous())]

    def part(some: slice) -> None:
        kernels.token_logprobs_backward(*(a[some] for a in arrays))

    in_threads(part, len(logits), _COST * logits.numel())
