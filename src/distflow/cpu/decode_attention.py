"""Attention of one new token per sequence on a CPU: in a kernel, or else as few, small products."""

import sys
from functools import cached_property
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from distflow.cpu import kernels_for
from distflow.model.attention import AttentionParams, softmax_weights
from distflow.util.arrays import Ints

_CALL, _SMALLEST = 512, 16  # a call of attention costs as much as reading so many keys; slots not worth splitting


class Cache(Protocol):
    pages: int
    page: int

    def layer(self, index: int, like: Tensor) -> Tensor: ...


class CpuDecode:
    """The same as `rollout.kv_cache.Decode`."""

    def __init__(self, cache: Cache, positions: Tensor, tables: Ints, device: torch.device) -> None:
        self.cache, self.positions, self.places = cache, positions, positions.numpy()
        self.tables = np.ascontiguousarray(tables)
        self._rows: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        both = self.cache.layer(layer, k)
        if (kernels := kernels_for(q)) and params.softcap is None:
            return self._in_kernel(kernels, both, q, k, v, params)
        both.view(-1, both.shape[-1]).index_copy_(0, self._new_rows(len(k)), torch.cat((k, v)).flatten(0, 1))
        queries, (keys, values) = q.transpose(0, 1), both.unbind()
        parts = [block(queries, keys, values, params) for block in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _in_kernel(
        self, kernels: ModuleType, both: Tensor, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams
    ) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        new = [x.transpose(0, 1).numpy() for x in (q, k, v)]
        window, scale = params.window or sys.maxsize, params.scale or q.shape[-1] ** -0.5
        kernels.attend(*new, both.numpy(), self.tables, self.places, window, np.float32(scale), out.numpy())
        return out

    @cached_property
    def blocks(self) -> list["_Block"]:
        _, bounds = split_slots(self.places + 1, 0, len(self.places))
        tables = torch.from_numpy(self.tables)
        return [_Block(lo, hi, self.positions[lo:hi], tables[lo:hi], self.cache.page) for lo, hi in bounds]

    def _new_rows(self, heads: int) -> Tensor:
        """The row of each (key or value, head, sequence) in the cache seen as one list of vectors."""
        if self._rows is None or len(self._rows) != 2 * heads * len(self.positions):
            size, (part, head) = self.cache.page, (torch.arange(n) for n in (2, heads))
            page = torch.from_numpy(np.take_along_axis(self.tables, self.places[:, None] // size, 1)[:, 0])
            first = (part[:, None, None] * self.cache.pages + page) * heads + head[:, None]
            self._rows = (first * size + self.positions % size).flatten()
        return self._rows


def split_slots(lengths: Ints, lo: int, hi: int) -> tuple[int, list[tuple[int, int]]]:
    """Splits slots into blocks, each of which reads as many keys as its longest sequence has, where that reads less.

    Returns the keys read, a call counted as some more, and the blocks.
    """
    whole = (hi - lo) * int(lengths[lo:hi].max()) + _CALL
    if hi - lo <= _SMALLEST:
        return whole, [(lo, hi)]
    middle = (lo + hi) // 2
    (one, first), (other, second) = split_slots(lengths, lo, middle), split_slots(lengths, middle, hi)
    return (whole, [(lo, hi)]) if whole <= one + other else (one + other, first + second)


def gather_pages(x: Tensor, table: Tensor, keys: int) -> Tensor:
    """Returns [sequences, heads, keys, dim] of x [pages, heads, page, dim]; row i of `table` has the pages of i."""
    pages = x[table]  # [sequences, pages, heads, page, dim]
    joined = pages[:, 0] if table.shape[1] == 1 else pages.transpose(1, 2).flatten(2, 3)
    return joined[:, :, :keys]


class _Block:
    """Some sequences, and as many keys as the longest of them has."""

    def __init__(self, lo: int, hi: int, positions: Tensor, tables: Tensor, page: int) -> None:
        self.lo, self.hi, self.positions, self.page = lo, hi, positions, page
        self.keys = int(positions.max()) + 1
        self.table = tables[:, : -(-self.keys // page)]
        self.even = int(positions.min()) + 1 == self.keys
        # Made by the first layer, for all of its kind.
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._bags: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        q = queries[self.lo : self.hi]
        weights = _weights(q, self._seen(keys), params, self._mask(params.window, keys.shape[1]))
        if values.dtype == torch.float32:
            return self._sum(weights, values).view(q.shape)
        return torch.bmm(weights, self._seen(values)).view(q.shape)

    def _seen(self, x: Tensor) -> Tensor:
        """[sequences and heads, keys, dim]"""
        return gather_pages(x, self.table, self.keys).flatten(0, 1)

    def _sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sums of vectors are what bags of embeddings are; a CPU is faster at them than at thin products."""
        each, heads = weights.shape[1], values.shape[1]
        if (heads, each) not in self._bags:
            key, head = torch.arange(self.keys), torch.arange(heads)[:, None]
            places = (self.table[:, None, key // self.page] * heads + head) * self.page + key % self.page
            vectors = places.flatten(0, 1).repeat_interleave(each, 0)  # [sequences, heads and each, keys]
            self._bags[heads, each] = vectors.flatten(), torch.arange(0, vectors.numel(), self.keys)
        vectors, starts = self._bags[heads, each]
        rows = values.view(-1, values.shape[-1])
        return embedding_bag(vectors, rows, starts, mode="sum", per_sample_weights=weights.flatten())

    def _mask(self, window: int | None, heads: int) -> Tensor | None:
        if self.even and (window is None or window >= self.keys):
            return None
        if (window, heads) not in self._masks:
            key = torch.arange(self.keys)
            hidden = key > self.positions[:, None]
            if window is not None:
                hidden |= key <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._masks[window, heads] = mask.repeat_interleave(heads, 0)[:, None]  # [slots and heads, 1, keys]
        return self._masks[window, heads]


def _weights(q: Tensor, k: Tensor, params: AttentionParams, mask: Tensor | None) -> Tensor:
    """Attention weights [pairs, heads of each, keys] of one query per sequence, q [n, heads, dim], to k [pairs of n and
    kv heads, keys, dim]; `mask` [pairs, 1, keys] is added to the scores.

    Heads that share keys are the queries of one small product: for so few of them that is faster than a kernel made
    for many.
    """
    few, scale = q.reshape(len(k), -1, q.shape[-1]), params.scale or q.shape[-1] ** -0.5
    if mask is None or params.softcap is not None or mask.dtype != q.dtype:
        scores = torch.baddbmm(q.new_empty(1), few, k.transpose(1, 2), beta=0, alpha=scale)  # beta 0: nothing is added
    else:
        scores, mask = torch.baddbmm(mask, few, k.transpose(1, 2), alpha=scale), None
    return softmax_weights(scores, params, mask).to(q.dtype)
