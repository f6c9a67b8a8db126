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


@dataclass(frozen=True)
class Spread:
    """Rows that several sequences share, and the sequences in full: which is where."""

    rows: Tensor  # [places]: the row of each token of the sequences
    places: Tensor  # [rows]: where a row is first
    again: Tensor  # [some places]: where rows are again

    def to(self, device: torch.device) -> "Spread":
        return Spread(self.rows.to(device), self.places.to(device), self.again.to(device))

    def out(self, x: Tensor) -> Tensor:
        """[rows, …] → [places, …]"""
        return _Out.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def back(self, x: Tensor) -> Tensor:
        """[places, …] → [rows, …]; of a row that is there again, what was computed first."""
        return _Back.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Out(torch.autograd.Function):
    """Its gradient is a sum over places; but nearly all rows have only one, and a sum over all is slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return x.index_select(0, spread.rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        s: Spread = ctx.spread
        total = d.index_select(0, s.places)
        return total.index_add_(0, s.rows[s.again], d.index_select(0, s.again)), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return x.index_select(0, spread.places)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        s: Spread = ctx.spread
        return d.new_zeros(len(s.rows), *d.shape[1:]).index_copy_(0, s.places, d), None


class Packed:
    """Sequences of these lengths, one after the other, each attending to its own past; or, with `spread`, the rows
    they share."""

    def __init__(self, lengths: Sequence[int], spread: Spread | None = None) -> None:
        self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]  # those of one length go together
        self.spread = spread

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        whole = [x.transpose(0, 1) for x in (q, k, v)]  # [tokens, heads, dim]
        if self.spread:
            whole = [self.spread.out(x) for x in whole]
        sizes = [count * length for count, length in self.runs]
        parts = []
        # Split at once: the gradient of a split is one join, that of many slices as many tensors of full size.
        for (count, length), *run in zip(self.runs, *(x.split(sizes) for x in whole), strict=True):
            q_run, k_run, v_run = (x.unflatten(0, (count, length)).transpose(1, 2) for x in run)
            out = attend(q_run, k_run, v_run, how, causal=True)  # [count, heads, length, dim]
            parts.append(out.transpose(1, 2).flatten(0, 1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.spread.back(joined) if self.spread else joined


def attend(q: Tensor, k: Tensor, v: Tensor, how: How, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """q [n, heads, queries, dim] on k, v [n, kv heads, keys, dim]; `mask` is added to the scores."""
    queries, keys = q.shape[2], k.shape[2]
    if causal and how.window is not None and how.window < keys:
        distance = torch.arange(queries, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        outside = (distance < 0) | (distance >= how.window)
        causal, mask = (
            False,
            torch.zeros(outside.shape, dtype=q.dtype, device=q.device).masked_fill_(outside, -torch.inf),
        )
    if how.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=how.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if causal:
        mask = torch.full((queries, keys), -torch.inf, device=q.device).triu(1)
    return _plainly(q, k, v, how, mask)


def weigh_once(q: Tensor, k: Tensor, how: How, mask: Tensor | None) -> Tensor:
    """One query a sequence, q [n, heads, dim]: what it gives to each of k [pairs of n and kv heads, keys, dim], as
    [pairs, heads of each, keys]; `mask` [pairs, 1, keys] is added to the scores.

    Heads that share keys are the queries of one small product: for so few of them that is faster than a kernel made
    for many.
    """
    few, scale = q.reshape(len(k), -1, q.shape[-1]), how.scale or q.shape[-1] ** -0.5
    if mask is None or how.softcap is not None or mask.dtype != q.dtype:
        scores = torch.baddbmm(q.new_empty(1), few, k.transpose(1, 2), beta=0, alpha=scale)  # beta 0: nothing is added
    else:
        scores, mask = torch.baddbmm(mask, few, k.transpose(1, 2), alpha=scale), None
    return _weights(scores, how, mask).to(q.dtype)


def _plainly(q: Tensor, k: Tensor, v: Tensor, how: How, mask: Tensor | None) -> Tensor:
    scores = (q * (how.scale or q.shape[-1] ** -0.5)) @ k.transpose(2, 3)
    return _weights(scores, how, mask).to(v.dtype) @ v


def _weights(scores: Tensor, how: How, mask: Tensor | None) -> Tensor:
    scores = scores.float()
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1)
