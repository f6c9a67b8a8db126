"""Attention without padding, plugged into any Hugging Face model that uses transformers' attention interface.

A forward pass sees all its sequences as one row of tokens, [1, tokens]; who attends to what is said by an object that
travels with the call: `Packed` here, the cache's own in cache.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "distflow"


@dataclass(frozen=True)
class How:
    """What a layer asks for: the factor of the scores, a window of so many last positions, a soft cap of the scores."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """q [heads, tokens, dim], k and v [kv heads, tokens, dim] → [tokens, heads, dim]."""
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    distflow: Attention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer."""
    assert distflow is not None, "the model does not hand keyword arguments on to its attention"
    how = How(scaling, sliding_window, softcap)
    return distflow(module.layer_idx, query[0], key[0], value[0], how)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attend)


class Packed:
    """Sequences of these lengths, one after the other, each attending to its own past."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]  # those of one length go together

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        sizes = [count * length for count, length in self.runs]
        parts = []
        # Split at once: the gradient of a split is one join, that of many slices as many tensors of full size.
        for (count, length), *run in zip(self.runs, *(x.split(sizes, 1) for x in (q, k, v)), strict=True):
            q_run, k_run, v_run = (x.unflatten(1, (count, length)).transpose(0, 1) for x in run)
            out = attend(q_run, k_run, v_run, how, causal=True)  # [count, heads, length, dim]
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(q: Tensor, k: Tensor, v: Tensor, how: How, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """q [n, heads, queries, dim] on k, v [n, kv heads, keys, dim]; `mask` is true where a query may look."""
    queries, keys = q.shape[2], k.shape[2]
    if causal and how.window is not None and how.window < keys:
        distance = torch.arange(queries, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        causal, mask = False, (distance >= 0) & (distance < how.window)
    if how.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(2, 3)).float() * (how.scale or q.shape[-1] ** -0.5)
    scores = how.softcap * torch.tanh(scores / how.softcap)
    if causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v
