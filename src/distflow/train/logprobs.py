"""Log-probs and entropy of tokens in chunks: the full [tokens × vocabulary] logits are never held."""

from typing import Any

import torch
from torch import Tensor

from distflow.cpu import kernels_for
from distflow.cpu import logprobs as cpu_logprobs
from distflow.cpu.products import add_product, linear, multiply
from distflow.device.sizes import sizes_of
from distflow.model.torch_kernels import float32_logits, multiply_in_float32


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns float32 log-probs of `targets` and entropy [n], from hidden states [n, width] and the output layer.

    Targets are [n], or [n, k] for several tokens at each place; the log-probs have their shape. The backward pass
    computes the logits a second time.
    """
    logprobs, entropy = _Head.apply(hidden, weight, bias, targets, temperature, softcap)  # type: ignore[no-untyped-call]
    return logprobs, entropy


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    vocabulary: int,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the k likeliest of the first tokens of the `vocabulary`, [n, k] int32, and their log-probs."""
    ids, logprobs = list[Tensor](), list[Tensor]()
    for part in _parts(hidden, len(weight)):
        logits = _logits(hidden[part], weight, bias, temperature, softcap)[0]
        best = logits[:, :vocabulary].topk(min(k, vocabulary), -1)
        ids.append(best.indices.int())
        logprobs.append(best.values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(logprobs)


@torch.no_grad()
def token_energy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Returns ‖1 − π‖² of each of `targets` [n], the squared gradient of its log-prob by the logits, in float32."""
    energy = list[Tensor]()
    for part in _parts(hidden, len(weight)):
        p = _logits(hidden[part], weight, bias, temperature, softcap)[0].softmax(-1)
        own = p.gather(1, targets[part][:, None])[:, 0]
        # Without the own token first: of one that is nearly certain, 1 − 2π + Σπ² would be a difference of large terms.
        others = p.scatter_(1, targets[part][:, None], 0.0)
        energy.append((1 - own).square() + others.square().sum(-1))
    return torch.cat(energy)


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
        ctx.set_materialize_grads(False)  # most losses leave the entropy alone, and have no gradient for it
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (hidden.new_empty(shape, dtype=dtype) for shape in (targets.shape, len(hidden)))
        for part in _parts(hidden, len(weight)):
            logits = _logits(hidden[part], weight, bias, temperature, softcap)[0]
            if targets.ndim == 1 and (kernels := kernels_for(logits)):
                logprobs[part], entropy[part] = cpu_logprobs.token_logprobs(kernels, logits, targets[part])
                continue
            logprobs[part] = logits.gather(1, targets[part].view(len(logits), -1)).view_as(targets[part])
            peak = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(peak)
            odds = shifted.exp()
            total = odds.sum(-1)
            norm = total.log() + peak[:, 0]
            logprobs[part] -= norm if targets.ndim == 1 else norm[:, None]
            entropy[part] = total.log() - (odds.mul_(shifted)).sum(-1) / total
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        if d_logprobs is None:
            if d_entropy is None:
                return None, None, None, None, None, None
            d_logprobs = d_entropy.new_zeros(targets.shape)
        d_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: many small terms would be lost in bfloat16.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(hidden, len(weight)):
            logits, slope = _logits(hidden[part], weight, bias, ctx.temperature, ctx.softcap)
            d_part = None if d_entropy is None else d_entropy[part]
            d_logits = _gradient(logits, targets[part], d_logprobs[part], d_part)
            if slope is not None:
                d_logits *= slope
            if ctx.temperature != 1:
                d_logits /= ctx.temperature
            d_logits = d_logits.to(hidden.dtype)
            multiply(d_logits, weight, out=d_hidden[part])
            if d_weight is not None and dtype == d_logits.dtype:
                add_product(d_logits.T, hidden[part], d_weight)
            elif d_weight is not None:
                d_weight += multiply_in_float32(d_logits.T, hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias, None, None, None


def _gradient(logits: Tensor, targets: Tensor, d: Tensor, d_entropy: Tensor | None) -> Tensor:
    """Returns the gradient with respect to the logits, in their memory."""
    if d.ndim == 1 and (kernels := kernels_for(logits)):
        d_entropy = torch.zeros_like(d) if d_entropy is None else d_entropy
        cpu_logprobs.token_logprobs_backward(kernels, logits, targets, d, d_entropy)
        return logits
    log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
    p = log_p.exp()
    d = d.view(len(logits), -1)
    total = d.sum(-1, keepdim=True)
    if d_entropy is not None:
        entropy = -(p * log_p).sum(-1, keepdim=True)
        d_logits = log_p.add_(entropy).mul_(-d_entropy[:, None]).sub_(total).mul_(p)
    else:
        d_logits = p.mul_(-total)
    return d_logits.scatter_add_(1, targets.view_as(d), d)


def _parts(hidden: Tensor, vocabulary: int) -> list[slice]:
    sizes = sizes_of(hidden.device.type)
    size = max(sizes.logit_tokens, sizes.logits // vocabulary)
    return [slice(i, i + size) for i in range(0, len(hidden), size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Returns logits, in float32 or wider, and the derivative of the soft cap if there is one."""
    logits = linear(hidden, weight, bias) if hidden.is_cpu else float32_logits(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if softcap is not None:
        logits = torch.tanh(logits / softcap)
        slope = 1 - logits * logits
        logits = logits * softcap
    return (logits / temperature if temperature != 1 else logits), slope
