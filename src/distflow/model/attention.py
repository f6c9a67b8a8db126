"""Attention without padding, plugged into any Hugging Face model that uses transformers' attention interface.

A forward pass sees all its sequences as one row of tokens, [1, tokens]. An object that travels with the call
decides which token attends to which: `PackedAttention` here, further ones in rollout/builtin/kv_cache.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from distflow.cpu import attention as cpu_attention
from distflow.model import varlen
from distflow.util.copies import to_device

NAME = "distflow"


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of a layer: scale of the scores, sliding window, soft cap of the scores."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def options(self) -> cpu_attention.Options:
        return self.scale, self.window, self.softcap


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """q [heads, tokens, dim], k and v [kv heads, tokens, dim] → [tokens, heads, dim]."""
        ...


def _from_transformers(
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
    """Adapts the call that transformers makes in each layer."""
    assert distflow is not None, "the model does not hand keyword arguments on to its attention"
    params = AttentionParams(scaling, sliding_window, softcap)
    return distflow(module.layer_idx, query[0], key[0], value[0], params)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _from_transformers)


def leave_uncompiled() -> None:
    """Keeps torch.compile from looking into attention, which has kernels of its own and reads lengths on the host."""
    AttentionInterface.register(NAME, torch.compiler.disable(_from_transformers))


@dataclass(frozen=True)
class SharedPrompts:
    """Maps rows of tokens, where sequences share their prompt, to the full sequences."""

    rows: Tensor  # [places]: the row of each token of the sequences
    first_places: Tensor  # [rows]: the first place of each row
    repeats: Tensor  # [some places]: places whose row has an earlier one
    own: tuple[int, ...]  # [sequences]: how many rows are in no earlier sequence; they are its last tokens

    def to(self, device: torch.device) -> "SharedPrompts":
        rows, first, repeats = (to_device(t, device) for t in (self.rows, self.first_places, self.repeats))
        return SharedPrompts(rows, first, repeats, self.own)

    def expand(self, x: Tensor) -> Tensor:
        """[rows, …] → [places, …]"""
        return _Expand.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def collapse(self, x: Tensor) -> Tensor:
        """[places, …] → [rows, …]; a row with several places takes the value of its first."""
        return _Collapse.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Expand(torch.autograd.Function):
    """Expands rows to places. Its gradient sums over places, slowly only for the few rows with several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        s: SharedPrompts = ctx.shared
        total = d.index_select(0, s.first_places)
        return total.index_add_(0, s.rows[s.repeats], d.index_select(0, s.repeats)), None


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.first_places)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        s: SharedPrompts = ctx.shared
        return d.new_zeros(len(s.rows), *d.shape[1:]).index_copy_(0, s.first_places, d), None


class PackedAttention:
    """Causal attention of sequences of these lengths, one after the other; with `shared`, of their shared rows."""

    def __init__(self, lengths: Sequence[int], shared: SharedPrompts | None = None) -> None:
        self.lengths, self.shared = lengths, shared
        self.runs = [(len(list(run)), length) for length, run in groupby(lengths)]
        self._bounds: varlen.Bounds | None = None  # made by the first layer, which knows the device
        self._some: dict[tuple[int, int], _Some] = {}  # of some rows; so is this

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [tokens, heads, dim]
        on_cpu = cpu_attention.has_kernel(q)
        if on_cpu or (params.softcap is None and varlen.has_kernel(q.device, q.dtype, q.shape[-1])):
            return self._in_one_call(q, k, v, params, on_cpu)
        whole = [q, k, v]
        if self.shared:
            whole = [self.shared.expand(x) for x in whole]
        sizes = [count * length for count, length in self.runs]
        parts = []
        # Split at once: the gradient of a split is one join, the gradient of many slices as many tensors of full size.
        for (count, length), *run in zip(self.runs, *(x.split(sizes) for x in whole), strict=True):
            q_run, k_run, v_run = (x.unflatten(0, (count, length)).transpose(1, 2) for x in run)
            out = attend(q_run, k_run, v_run, params, causal=True)  # [count, heads, length, dim]
            parts.append(out.transpose(1, 2).flatten(0, 1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.shared.collapse(joined) if self.shared else joined

    def _in_one_call(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, on_cpu: bool) -> Tensor:
        """A prompt's queries are computed once: only its keys are repeated for the sequences that share it."""
        queries = self.shared.own if self.shared else self.lengths
        if self.shared:
            k, v = self.shared.expand(k), self.shared.expand(v)
        if on_cpu:
            return cpu_attention.attend(q, k, v, queries, self.lengths, params.options)
        if self._bounds is None:
            self._bounds = varlen.Bounds.of(queries, self.lengths, q.device)
        return varlen.attend(q, k, v, self._bounds, params.scale, params.window)

    def of_rows(self, first: int, last: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        """The same for the queries of some rows, q [heads, last − first, dim] → [last − first, heads, dim]."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if not q.numel():
            return q
        if (first, last) not in self._some:
            self._some[first, last] = self._of_rows(first, last, q.device)
        queries, lengths, keys, bounds = self._some[first, last]
        k, v = k.index_select(0, keys), v.index_select(0, keys)
        if cpu_attention.has_kernel(q):
            return cpu_attention.attend(q, k, v, queries, lengths, params.options)
        if params.softcap is None and varlen.has_kernel(q.device, q.dtype, q.shape[-1]):
            return varlen.attend(q, k, v, bounds, params.scale, params.window)
        parts = []
        for q_part, k_part, v_part in zip(q.split(queries), k.split(lengths), v.split(lengths), strict=True):
            q_one, k_one, v_one = (x.transpose(0, 1)[None] for x in (q_part, k_part, v_part))
            mask = _mask(len(q_part), len(k_part), params.window, q)
            parts.append(attend(q_one, k_one, v_one, params, mask=mask)[0].transpose(0, 1))
        return torch.cat(parts)

    def _of_rows(self, first: int, last: int, device: torch.device) -> "_Some":
        queries, lengths, keys = [], [], []
        end = place = 0  # of the sequence: behind its last row, its first place
        for own, length in zip(self.shared.own if self.shared else self.lengths, self.lengths, strict=True):
            start, end = end, end + own
            count = min(end, last) - max(start, first)
            if count > 0:
                queries.append(count)
                lengths.append(length - max(0, end - last))
                keys.append(torch.arange(place, place + lengths[-1]))
            place += length
        places = to_device(torch.cat(keys), device)
        rows = self.shared.rows[places] if self.shared else places
        return queries, lengths, rows, varlen.Bounds.of(queries, lengths, device)


_Some = tuple[list[int], list[int], Tensor, varlen.Bounds]  # queries and keys of sequences; the rows of the keys


def attend(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """q [n, heads, queries, dim] on k, v [n, kv heads, keys, dim]; `mask` is added to the scores."""
    queries, keys = q.shape[2], k.shape[2]
    if causal and params.window is not None and params.window < keys:
        mask, causal = _mask(queries, keys, params.window, q), False
    repeat = q.shape[1] // k.shape[1]
    if params.softcap is not None or (repeat > 1 and not _has_gqa_kernel(q, mask)):
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if params.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=params.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if causal:
        mask = torch.full((queries, keys), -torch.inf, device=q.device).triu(1)
    scores = (q * (params.scale or q.shape[-1] ** -0.5)) @ k.transpose(2, 3)
    return softmax_weights(scores, params, mask).to(v.dtype) @ v


def _mask(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """Returns the mask [queries, keys] of queries at the last places, which see what is in the window before them."""
    places = torch.arange(keys, device=like.device)
    distance = places[keys - queries :, None] - places
    outside = (distance < 0) | (distance >= (window or keys))
    return torch.zeros(outside.shape, dtype=like.dtype, device=like.device).masked_fill_(outside, -torch.inf)


def _has_gqa_kernel(q: Tensor, mask: Tensor | None) -> bool:
    """Returns whether SDPA has a fused kernel for grouped queries: on GPUs, for 16 bits, no mask and moderate heads.

    Otherwise torch would silently hold the scores of all pairs of tokens.
    """
    return q.is_cpu or (q.dtype.itemsize == 2 and mask is None and q.shape[-1] <= 256)


def softmax_weights(scores: Tensor, params: AttentionParams, mask: Tensor | None) -> Tensor:
    """Computes attention in float32, with the soft cap and the mask that SDPA does not combine."""
    scores = scores.float()
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1)
