"""The KV cache of a CPU with kernels: keys and values as panels, and one attention for prompts and decoding, which is
the trainer's."""

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.cpu.attention import Panels, blocks_of, has_kernel
from distflow.model.attention import AttentionParams
from distflow.rollout.builtin.kv_cache import KVCache, table_of
from distflow.util.arrays import Ints


def has_panels(model: PreTrainedModel) -> bool:
    return has_kernel(next(model.parameters()))


class PanelCache(KVCache):
    def __init__(self, pages: int, page: int) -> None:
        super().__init__(pages, page)
        self.panels: dict[int, Panels] = {}

    def panels_of(self, index: int, like: Tensor) -> Panels:
        """Returns the panels of a layer, whose memory the system gives as pages are first written."""
        if index not in self.panels:
            self.panels[index] = Panels(self.pages, self.page, like)
        return self.panels[index]

    def _copy_pages(self, sources: Ints, targets: Ints, positions: int) -> None:
        for panels in self.panels.values():
            panels.copy(sources, targets, positions)

    def attention(
        self, starts: Ints, ends: Ints, tables: Rows[Rows[int]] | Ints, device: torch.device
    ) -> "PanelAttention":
        return PanelAttention(self, starts, ends, table_of(tables, ends, self.page))


class PanelAttention:
    """Attention of the tokens from `starts` to `ends` of each sequence to all before them; row i of `table` has the
    pages of sequence i."""

    def __init__(self, cache: PanelCache, starts: Ints, ends: Ints, table: Ints) -> None:
        self.cache, self.table, self.starts, self.lengths = cache, table, starts, ends - starts
        firsts = np.cumsum(self.lengths) - self.lengths
        places = np.arange(int(self.lengths.sum())) + np.repeat(starts - firsts, self.lengths)
        self.pages = table[np.repeat(np.arange(len(ends)), self.lengths), places // cache.page]
        self.places = places % cache.page
        self._blocks: dict[int, Ints] = {}  # by the number of heads that share keys

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [tokens, heads, dim]
        each = q.shape[1] // k.shape[1]
        if each not in self._blocks:
            self._blocks[each] = blocks_of(self.starts, self.lengths, each)
        panels = self.cache.panels_of(layer, k)
        panels.write(k, v, self.pages, self.places)
        return panels.attend(q, self.table, self._blocks[each], params.options)
