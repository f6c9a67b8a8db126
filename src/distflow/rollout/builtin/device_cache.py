"""The KV cache of a device: attention reads its pages where they are, in one kernel for all sequences of a pass."""

from collections.abc import Sequence as Rows
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from distflow.model import varlen
from distflow.model.attention import AttentionParams
from distflow.model.source import head_dim
from distflow.rollout.builtin.kv_cache import KVCache, table_of
from distflow.util.arrays import Ints
from distflow.util.copies import to_device

PAGE = 256  # tokens: what the kernel takes is a multiple of it


def reads_pages(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether torch has a kernel for the attention of this model that reads pages."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    dtype = next(model.parameters()).dtype
    return softcap is None and varlen.has_kernel(device, dtype, head_dim(model.config))


class DeviceCache(KVCache):
    """Keys and values, [pages, page, keys' heads and values' heads, dim] per layer."""

    def layer(self, index: int, like: Tensor) -> Tensor:
        if index not in self.layers:
            heads, _, dim = like.shape
            # Zeros: what lies behind a sequence's end has weight 0, and 0 × NaN would be NaN.
            self.layers[index] = like.new_zeros((self.pages, self.page, 2 * heads, dim))
        return self.layers[index]

    def attention(
        self, starts: Ints, ends: Ints, tables: Rows[Rows[int]] | Ints, device: torch.device
    ) -> "PagedAttention":
        return PagedAttention(self, starts, ends, tables, device)

    def _copy(self, both: Tensor, sources: Tensor, targets: Tensor, positions: int) -> None:
        both[targets, :positions] = both[sources, :positions]


def numbers_of(starts: Ints, ends: Ints, table: Ints, page: int) -> NDArray[np.int32]:
    """Returns all that the attention of a pass needs to know: bounds of queries and keys, the pages of each sequence,
    and the places to which keys and values are written."""
    lengths = ends - starts
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
    pages = table[np.repeat(np.arange(len(ends)), lengths), places // page]
    parts = [[0], np.cumsum(lengths), [0], np.cumsum(ends), ends, table.ravel(), pages * page + places % page]
    return np.concatenate(parts).astype(np.int32)


class PagedAttention:
    """Attention of the tokens from `starts` to `ends` of each sequence to all before them; row i of `tables` has the
    pages of sequence i."""

    def __init__(
        self, cache: DeviceCache, starts: Ints, ends: Ints, tables: Rows[Rows[int]] | Ints, device: torch.device
    ) -> None:
        table, lengths = table_of(tables, ends, cache.page), ends - starts
        numbers = to_device(torch.from_numpy(numbers_of(starts, ends, table, cache.page)), device)  # in one copy
        self._use(cache, numbers, table.shape, int(lengths.sum()), int(lengths.max()), int(ends.max()))

    @classmethod
    def of_single_tokens(cls, cache: DeviceCache, numbers: Tensor, shape: tuple[int, int]) -> "PagedAttention":
        """Returns the attention of one token of each sequence, whatever the numbers are when it is computed; `shape`:
        of the table of pages."""
        self = cls.__new__(cls)
        self._use(cache, numbers, shape, shape[0], 1, shape[1] * cache.page)
        return self

    def _use(
        self, cache: DeviceCache, numbers: Tensor, shape: tuple[int, ...], tokens: int, longest: int, most: int
    ) -> None:
        self.cache, count = cache, shape[0]
        queries, keys, self.used, blocks, places = numbers.split([count + 1, count + 1, count, prod(shape), tokens])
        self.bounds = varlen.Bounds(queries, keys, longest, most)
        self.blocks, self.places = blocks.view(shape), places.long()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        assert params.softcap is None
        pages = self.cache.layer(layer, k)
        pages.flatten(0, 1).index_copy_(0, self.places, _adjacent(k.transpose(0, 1), v.transpose(0, 1)))
        keys, values = pages.chunk(2, 2)
        return varlen.attend_pages(
            q.transpose(0, 1), keys, values, self.bounds, self.used, self.blocks, params.scale, params.window
        )


def _adjacent(k: Tensor, v: Tensor) -> Tensor:
    """Returns [tokens, heads of both, dim]: the memory that the two are parts of, if their heads lie side by side."""
    tokens, heads, dim = k.shape
    side_by_side = k.stride() == v.stride() and v.storage_offset() - k.storage_offset() == heads * k.stride(1)
    if side_by_side and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
        return k.as_strided((tokens, 2 * heads, dim), k.stride(), k.storage_offset())
    return torch.cat((k, v), 1)
