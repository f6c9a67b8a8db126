"""Log-probs and entropy of tokens in chunks: the full [tokens × vocabulary] logits are never held."""

from typing import Any

import torch
from torch import Tensor

from distflow.cpu import as_numpy, kernels_for
from distflow.cpu.train_ops import add_product, linear, multiply

_CHUNK = 1 << 20  # logits held at once
_MIN_TOKENS = 128  # tokens per chunk at least, as each chunk reads the whole output layer


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns float32 log-probs of `targets` [n] and entropy [n], from hidden states [n, width] and the output layer.

    The backward pass computes the logits a second time.
    """
    logprobs, entropy = _Head.apply(hidden, weight, bias, targets, temperature, softcap)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.temperature, ctx.softcap = temperature, softcap
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(2))
        for part in _parts(len(hidden), len(weight)):
            logits = _logits(hidden[part], weight, bias, temperature, softcap)[0]
            if kernels := kernels_for(logits):
                kernels.token_logprobs(*map(as_numpy, (logits, targets[part], logprobs[part], entropy[part])))
                continue
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0]
            peak = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(peak)
            odds = shifted.exp()
            total = odds.sum(-1)
            logprobs[part] -= total.log() + peak[:, 0]
            entropy[part] = total.log() - (odds.mul_(shifted)).sum(-1) / total
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: many small terms would be lost in bfloat16.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        with_entropy = bool(d_entropy.any())  # most losses leave the entropy alone
        for part in _parts(len(hidden), len(weight)):
            logits, slope = _logits(hidden[part], weight, bias, ctx.temperature, ctx.softcap)
            d_logits = _gradient(logits, targets[part], d_logprobs[part], d_entropy[part], with_entropy)
            if slope is not None:
                d_logits *= slope
            if ctx.temperature != 1:
                d_logits /= ctx.temperature
            d_logits = d_logits.to(hidden.dtype)
            multiply(d_logits, weight, out=d_hidden[part])
            if d_weight is not None and dtype == d_logits.dtype:
                add_product(d_logits.T, hidden[part], d_weight)
            elif d_weight is not None:
                d_weight += d_logits.T @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias, None, None, None


def _gradient(logits: Tensor, targets: Tensor, d: Tensor, d_entropy: Tensor, with_entropy: bool) -> Tensor:
    """Returns the gradient with respect to the logits, in their memory."""
    if kernels := kernels_for(logits):
        kernels.token_logprobs_backward(*map(as_numpy, (logits, targets, d.contiguous(), d_entropy.contiguous())))
        return logits
    log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
    p = log_p.exp()
    d, d_entropy = d[:, None], d_entropy[:, None]
    if with_entropy:
        entropy = -(p * log_p).sum(-1, keepdim=True)
        d_logits = log_p.add_(entropy).mul_(-d_entropy).sub_(d).mul_(p)
    else:
        d_logits = p.mul_(-d)
    return d_logits.scatter_add_(1, targets[:, None], d)


def _parts(tokens: int, vocabulary: int) -> list[slice]:
    size = max(_MIN_TOKENS, _CHUNK // vocabulary)
    return [slice(i, i + size) for i in range(0, tokens, size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Returns logits, in float32 or wider, and the derivative of the soft cap if there is one."""
    logits = linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if softcap is not None:
        logits = torch.tanh(logits / softcap)
        slope = 1 - logits * logits
        logits = logits * softcap
    return (logits / temperature if temperature != 1 else logits), slope
