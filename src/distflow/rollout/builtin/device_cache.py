"""The KV cache of a device: attention reads its pages where they are, in one kernel for all sequences of a pass."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
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
    """Whether torch has a kernel for the attention of this model that reads pages."""
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


class PagedAttention:
    """Attention of the tokens from `starts` to `ends` of each sequence to all before them; row i of `tables` has the
    pages of sequence i."""

    def __init__(
        self, cache: DeviceCache, starts: Ints, ends: Ints, tables: Rows[Rows[int]] | Ints, device: torch.device
    ) -> None:
        self.cache, lengths, table = cache, ends - starts, table_of(tables, ends, cache.page)
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)
        pages = table[np.repeat(np.arange(len(ends)), lengths), places // cache.page]
        parts = [
            [0],
            np.cumsum(lengths),
            [0],
            np.cumsum(ends),
            ends,
            table.ravel(),
            pages * cache.page + places % cache.page,
        ]
        sizes = [len(ends) + 1, len(ends) + 1, len(ends), table.size, len(places)]
        whole = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int32)), device)  # in one copy
        queries, keys, self.used, blocks, places_on_device = whole.split(sizes)
        self.bounds = varlen.Bounds(queries, keys, int(lengths.max()), int(ends.max()))
        self.blocks, self.places = blocks.view(table.shape), places_on_device.long()

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
