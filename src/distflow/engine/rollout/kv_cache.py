"""The KV cache: a fixed number of slots, one sequence each. The slots in use are always the first ones."""

from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from distflow.data.balance import Ints
from distflow.engine.cpu import kernels_for
from distflow.engine.model.attention import How, Packed, weigh_once

_CALL, _SMALLEST = 512, 16  # a call of attention costs as much as reading so many keys; slots not worth cutting


class Cache:
    """Keys and values, [2, slots, kv heads, longest, dim] per layer; memory is taken once and kept."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots, self.longest = slots, longest
        self.layers: dict[int, Tensor] = {}  # made when a layer first writes, which says its shape

    def layer(self, index: int, like: Tensor) -> Tensor:
        if index not in self.layers:
            # Zeros: what lies behind a sequence's end has weight 0, and 0 × NaN would be NaN.
            self.layers[index] = like.new_zeros(2, self.slots, like.shape[0], self.longest, like.shape[2])
        return self.layers[index]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of some slots into others."""
        for both in self.layers.values():
            both[:, targets, :, :length] = both[:, sources, :, :length]


class Prefill(Packed):
    """Whole prompts: each attends to itself, and is written to a slot of its own."""

    def __init__(self, cache: Cache, lengths: list[int], slots: list[int]) -> None:
        super().__init__(lengths)
        self.cache, self.lengths, self.into = cache, lengths, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        start = 0
        for slot, length in zip(self.into, self.lengths, strict=True):
            keys[slot, :, :length] = k[:, start : start + length]
            values[slot, :, :length] = v[:, start : start + length]
            start += length
        return super().__call__(layer, q, k, v, how)


class Decode:
    """One new token for each of the first slots, at these positions."""

    def __init__(self, cache: Cache, positions: Tensor) -> None:
        self.cache, self.positions, self.places = cache, positions, positions.cpu().numpy()
        self._rows: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        both = self.cache.layer(layer, k)
        if (compiled := kernels_for(q)) and how.softcap is None:
            return self._compiled(compiled, both, q, k, v, how)
        both.view(-1, both.shape[-1]).index_copy_(0, self._where(len(k)), torch.cat((k, v)).flatten(0, 1))
        queries, (keys, values) = q.transpose(0, 1), both.unbind()
        parts = [block(queries, keys, values, how) for block in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compiled(self, compiled: ModuleType, both: Tensor, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        new = [x.transpose(0, 1).numpy() for x in (q, k, v)]
        window, scale = how.window or self.cache.longest, how.scale or q.shape[-1] ** -0.5
        compiled.attend(*new, both.numpy(), self.places, window, np.float32(scale), out.numpy())
        return out

    @cached_property
    def blocks(self) -> list["_Block"]:
        _, cut = _cut(self.places + 1, 0, len(self.places))
        return [_Block(lo, hi, self.positions[lo:hi]) for lo, hi in cut]

    def _where(self, heads: int) -> Tensor:
        """The row of each (key or value, head, slot) in the cache seen as one list of vectors."""
        if self._rows is None or len(self._rows) != 2 * heads * len(self.positions):
            part, head, slot = (torch.arange(n, device=self.positions.device) for n in (2, heads, len(self.positions)))
            first = (part[:, None, None] * self.cache.slots + slot) * heads + head[:, None]
            self._rows = (first * self.cache.longest + self.positions).flatten()
        return self._rows


def _cut(lengths: Ints, lo: int, hi: int) -> tuple[int, list[tuple[int, int]]]:
    """Slots in blocks, each of which reads as many keys as its longest sequence has: in halves where that reads less.

    The keys read, counting a call as some more, and the blocks.
    """
    whole = (hi - lo) * int(lengths[lo:hi].max()) + _CALL
    if hi - lo <= _SMALLEST:
        return whole, [(lo, hi)]
    middle = (lo + hi) // 2
    (one, first), (other, second) = _cut(lengths, lo, middle), _cut(lengths, middle, hi)
    return (whole, [(lo, hi)]) if whole <= one + other else (one + other, first + second)


class _Block:
    """Some slots, and as many keys as the longest of them has."""

    def __init__(self, lo: int, hi: int, positions: Tensor) -> None:
        self.lo, self.hi, self.positions = lo, hi, positions
        self.keys = int(positions.max()) + 1
        self.even = int(positions.min()) + 1 == self.keys
        # Made by the first layer, for all of its kind.
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._bags: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, how: How) -> Tensor:
        q = queries[self.lo : self.hi]
        weights = weigh_once(q, self._seen(keys), how, self._mask(how.window, keys.shape[1]))
        if values.device.type == "cpu" and values.dtype == torch.float32:
            return self._sum(weights, values).view(q.shape)
        return torch.bmm(weights, self._seen(values)).view(q.shape)

    def _seen(self, x: Tensor) -> Tensor:
        """[slots and heads, keys, dim]"""
        return x[self.lo : self.hi, :, : self.keys].flatten(0, 1)

    def _sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sums of vectors are what bags of embeddings are; a CPU is faster at them than at thin products."""
        each, (_, heads, longest, _) = weights.shape[1], values.shape
        if (heads, each) not in self._bags:
            first = torch.arange(self.lo * heads, self.hi * heads, dtype=torch.int32).mul_(longest)
            vectors = first.repeat_interleave(each)[:, None] + torch.arange(self.keys, dtype=torch.int32)
            starts = torch.arange(len(vectors), dtype=torch.int32).mul_(self.keys)
            self._bags[heads, each] = vectors.flatten(), starts
        vectors, starts = self._bags[heads, each]
        rows = values.view(-1, values.shape[-1])
        return embedding_bag(vectors, rows, starts, mode="sum", per_sample_weights=weights.flatten())

    def _mask(self, window: int | None, heads: int) -> Tensor | None:
        if self.even and (window is None or window >= self.keys):
            return None
        if (window, heads) not in self._masks:
            place = torch.arange(self.keys, device=self.positions.device)
            hidden = place > self.positions[:, None]
            if window is not None:
                hidden |= place <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window, heads] = mask.repeat_interleave(heads, 0)[:, None]  # [slots and heads, 1, keys]
        return self._masks[window, heads]
