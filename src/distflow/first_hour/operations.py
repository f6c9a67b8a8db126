"""Operations whose kernels only the device has, against the same in float64 on the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distflow.cluster.world import own_device
from distflow.model import varlen
from distflow.model.torch_kernels import torch_has
from distflow.rollout.engine import SamplingParams
from distflow.rollout.sampling import sample
from distflow.train.logprobs import token_logprobs

_PAGE = 256
_DIM, _HEADS, _KV_HEADS = 64, 4, 2


def answer() -> dict[str, Any]:
    """Returns for each operation its largest error, and what is allowed; or why it was left out."""
    device = own_device()
    found = {}
    for name, (check, limit) in _CHECKS.items():
        error = check(device)
        found[name] = {"error": error, "limit": limit} if error is not None else {"left out": "no such kernel"}
    return {"operations": found}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns causal attention of the last tokens in float64, [queries, heads, dim]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    places = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    seen = torch.arange(k.shape[1]) <= places
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)


def packed_attention(device: torch.device) -> float | None:
    """Tries several sequences in one call, forward and backward."""
    if not varlen.has_kernel(device, torch.bfloat16, _DIM):
        return None
    lengths = (5, 130, 300)
    tokens = sum(lengths)
    q, k, v = (_random(tokens, heads, _DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(lengths) for x in wide), strict=True)
    expected = torch.cat([_attended(*part) for part in parts])
    weight = _random(tokens, _HEADS, _DIM)
    (expected * weight.double()).sum().backward()
    q, k, v = own = [x.to(device).requires_grad_() for x in (q, k, v)]
    out = varlen.attend(q, k, v, varlen.Bounds.of(lengths, lengths, device), None, None)
    (out * weight.to(device)).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(own, wide, strict=True))]
    return max(_difference(a, b) for a, b in pairs)


def paged_attention(device: torch.device) -> float | None:
    """Tries one query of each sequence, to keys in pages of a cache."""
    if not varlen.has_kernel(device, torch.bfloat16, _DIM):
        return None
    lengths = np.array([3, 256, 700])
    table = np.array([[5, 0, 0], [1, 0, 0], [4, 2, 3]])
    pages = _random(6, _PAGE, 2 * _KV_HEADS, _DIM)
    q = _random(len(lengths), _HEADS, _DIM)
    keys, values = pages.chunk(2, 2)
    expected = []
    for i, length in enumerate(lengths):
        k, v = (x[table[i]].flatten(0, 1)[:length] for x in (keys, values))
        expected.append(_attended(q[i : i + 1], k, v))
    ones = [1] * len(lengths)
    bounds = varlen.Bounds.of(ones, lengths.tolist(), device)
    used, blocks = (torch.from_numpy(x).int().to(device) for x in (lengths, table))
    keys, values = pages.to(device).chunk(2, 2)
    out = varlen.attend_pages(q.to(device), keys, values, bounds, used, blocks, None, None)
    return _difference(out, torch.cat(expected))


def logprobs(device: torch.device) -> float | None:
    """Log-probs of a product in 16 bits whose logits are not rounded."""
    if device.type == "cpu":
        return None
    hidden, weight, targets = _random(30, _DIM), _random(500, _DIM), torch.arange(30)
    got, _ = token_logprobs(hidden.to(device), weight.to(device), None, targets.to(device))
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return _difference(got, expected)


def norm(device: torch.device) -> float | None:
    if not torch_has("aten::_fused_rms_norm", device):
        return None
    x, weight = _random(9, _DIM), _random(_DIM)
    out = torch.ops.aten._fused_rms_norm(x.to(device), [_DIM], weight.to(device), 1e-6)[0]
    wide = x.double()
    return _difference(out, wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double())


def sampled_tokens(device: torch.device) -> float | None:
    """Returns the share of tokens that are others than on a CPU."""
    logits, numbers, params = _random(64, 1000).float(), np.arange(64), SamplingParams(max_tokens=4)
    ours, theirs = (sample(x, params, 7, numbers, numbers)[0].cpu() for x in (logits.to(device), logits))
    return float((ours != theirs).float().mean())


def _difference(got: Tensor | None, expected: Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    wide = expected.detach().double()
    return float((got.detach().cpu().double() - wide).abs().max() / wide.abs().max().clamp(min=1))


_CHECKS: dict[str, tuple[Callable[[torch.device], float | None], float]] = {
    "attention of packed sequences": (packed_attention, 0.1),
    "attention to pages": (paged_attention, 0.02),
    "log-probs": (logprobs, 1e-3),
    "norm": (norm, 0.05),
    "sampled tokens": (sampled_tokens, 0.05),
}
