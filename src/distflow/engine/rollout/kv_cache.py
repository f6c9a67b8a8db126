"""The KV cache: a fixed number of slots, one sequence each. Slots in use are always the first ones."""

import torch
from torch import Tensor

from distflow.engine.model.attention import AttentionParams, PackedAttention, attend


class KVCache:
    """Keys and values, [2, slots, kv heads, longest, dim] per layer; memory is allocated once and kept."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots, self.longest = slots, longest
        self.layers: dict[int, Tensor] = {}  # made when a layer first writes, which is when its shape is known

    def layer(self, index: int, like: Tensor) -> Tensor:
        if index not in self.layers:
            # Zeros: what lies behind a sequence's end has weight 0, and 0 × NaN would be NaN.
            self.layers[index] = like.new_zeros(2, self.slots, like.shape[0], self.longest, like.shape[2])
        return self.layers[index]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of some slots to others."""
        for both in self.layers.values():
            sources, targets = sources.to(both.device), targets.to(both.device)  # the first layer moves them for all
            both[:, targets, :, :length] = both[:, sources, :, :length]


class Prefill(PackedAttention):
    """Attention of whole prompts to themselves; their keys and values are written to a slot each."""

    def __init__(self, cache: KVCache, lengths: list[int], slots: list[int]) -> None:
        super().__init__(lengths)
        self.cache, self.prompt_lengths, self.prompt_slots = cache, lengths, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        start = 0
        for slot, length in zip(self.prompt_slots, self.prompt_lengths, strict=True):
            keys[slot, :, :length] = k[:, start : start + length]
            values[slot, :, :length] = v[:, start : start + length]
            start += length
        return super().__call__(layer, q, k, v, params)


class Decode:
    """Attention of one new token for each of the first slots, at these positions, which are in host memory."""

    def __init__(self, cache: KVCache, positions: Tensor, device: torch.device) -> None:
        self.cache, self.positions = cache, positions.to(device)
        self.slots = torch.arange(len(positions), device=device)
        self.keys = int(positions.max()) + 1
        self._masks: dict[int | None, Tensor] = {}  # by window, made by the first layer that has it

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        keys[self.slots, :, self.positions] = k.transpose(0, 1)
        values[self.slots, :, self.positions] = v.transpose(0, 1)
        count = len(self.positions)
        k_seen, v_seen = keys[:count, :, : self.keys], values[:count, :, : self.keys]
        query = q.transpose(0, 1)[:, :, None]  # [sequences, heads, 1, dim]
        return attend(query, k_seen, v_seen, params, mask=self._mask(params.window, q.dtype))[:, :, 0]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            key = torch.arange(self.keys, device=self.positions.device)
            hidden = key > self.positions[:, None]
            if window is not None:
                hidden |= key <= self.positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]  # [sequences, 1, 1, keys]
        return self._masks[window]
