"""Log-probs of tokens by the kernels: one function for the sampler and the trainer."""

from types import ModuleType

import torch
from torch import Tensor

from distflow.cpu import by_rows

_COST = 32  # of an element, in multiplications of a product


def token_logprobs(kernels: ModuleType, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each row's target, and the row's entropy."""
    logprobs, entropy = torch.empty(2, len(logits))
    by_rows(kernels.token_logprobs, _COST, logits.contiguous(), targets, logprobs, entropy)
    return logprobs, entropy


def token_logprobs_backward(kernels: ModuleType, logits: Tensor, targets: Tensor, d: Tensor, d_entropy: Tensor) -> None:
    """Overwrites the logits with the gradient by them."""
    by_rows(kernels.token_logprobs_backward, _COST, logits, targets, d.contiguous(), d_entropy.contiguous())
