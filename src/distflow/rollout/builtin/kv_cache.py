"""The KV cache: keys and values in pages of a pool, so that a sequence holds as much of it as it has tokens."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from distflow.model.attention import Attention, AttentionParams, PackedAttention, attend
from distflow.util.arrays import Ints
from distflow.util.copies import to_device

_CALL, _SMALLEST = 512, 16  # a call of attention costs as much as reading so many keys; slots not worth splitting


class KVCache:
    """Keys and values, [2, pages, kv heads, page, dim] per layer. Where the memory is the CPU's, the system gives it as
    pages are first written."""

    def __init__(self, pages: int, page: int) -> None:
        self.pages, self.page, self.longest = pages, page, pages * page
        self.layers: dict[int, Tensor] = {}  # made when a layer first writes, which is when its shape is known

    def layer(self, index: int, like: Tensor) -> Tensor:
        if index not in self.layers:
            # Zeros: what lies behind a sequence's end has weight 0, and 0 × NaN would be NaN.
            self.layers[index] = _zeros((2, self.pages, like.shape[0], self.page, like.shape[2]), like)
        return self.layers[index]

    def copy(self, copies: Iterable[tuple[Rows[int], Rows[int], int]]) -> None:
        """Copies sequences, each given by its pages, those of its copy, and its length."""
        whole, last, rest = list[tuple[int, int]](), list[tuple[int, int]](), 0
        for source, target, length in copies:
            count, left = divmod(length, self.page)
            whole += zip(source[:count], target[:count], strict=True)
            if left:
                last.append((source[count], target[count]))
                rest = max(rest, left)  # what is copied beyond an end is not read
        for pages, positions in ((whole, self.page), (last, rest)):
            if not pages:
                continue
            sources, targets = np.array(pages, np.int64).T.copy()
            self._copy_pages(sources, targets, positions)

    def _copy_pages(self, sources: Ints, targets: Ints, positions: int) -> None:
        source, target = torch.from_numpy(sources), torch.from_numpy(targets)
        for both in self.layers.values():
            # The first layer moves them.
            source, target = to_device(source, both.device), to_device(target, both.device)
            self._copy(both, source, target, positions)

    def attention(self, starts: Ints, ends: Ints, tables: Rows[Rows[int]] | Ints, device: torch.device) -> Attention:
        """Returns the attention of the tokens from `starts` to `ends` of each sequence to all before them; row i of
        `tables` has the pages of sequence i."""
        if not starts.any():
            return Prefill(self, ends.tolist(), table_of(tables, ends, self.page).tolist())
        if (ends - starts == 1).all():
            return Decode(self, torch.from_numpy(starts), table_of(tables, ends, self.page), device)
        return Extension(self, starts.tolist(), ends.tolist(), table_of(tables, ends, self.page), device)

    def _copy(self, both: Tensor, sources: Tensor, targets: Tensor, positions: int) -> None:
        both[:, targets, :, :positions] = both[:, sources, :, :positions]


def table_of(tables: Rows[Rows[int]] | Ints, ends: Ints, page: int) -> Ints:
    """Returns the pages that sequences with so many tokens have, [sequences, most pages]."""
    most = -(-int(ends.max()) // page)
    if isinstance(tables, np.ndarray):
        return np.ascontiguousarray(tables[:, :most])
    table = np.zeros((len(ends), most), np.int64)
    for row, pages in zip(table, tables, strict=True):
        row[: len(pages)] = pages[:most]
    return table


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns zeros; on a CPU in memory that was never touched, which torch's own would be."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = like.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)


class Prefill(PackedAttention):
    """Attention of whole prompts to themselves; their keys and values are written to pages of their own."""

    def __init__(self, cache: KVCache, lengths: list[int], tables: Rows[Rows[int]]) -> None:
        super().__init__(lengths)
        self.cache, size = cache, cache.page
        starts = accumulate(lengths, initial=0)
        self.parts = [  # (page, first token, end of tokens)
            (page, start + first, start + min(first + size, length))
            for start, length, table in zip(starts, lengths, tables, strict=False)
            for page, first in zip(table, range(0, length, size), strict=False)
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        for page, first, end in self.parts:
            keys[page, :, : end - first] = k[:, first:end]
            values[page, :, : end - first] = v[:, first:end]
        return super().__call__(layer, q, k, v, params)


class Extension:
    """Attention of the tokens from `starts` to `ends` of each sequence to all before them, which are in its pages."""

    def __init__(self, cache: KVCache, starts: list[int], ends: list[int], tables: Ints, device: torch.device) -> None:
        self.cache, self.device = cache, device
        self.spans, lengths = list(zip(starts, ends, strict=True)), [b - a for a, b in zip(starts, ends, strict=True)]
        self.lengths = lengths
        places = np.concatenate([np.arange(a, b) for a, b in self.spans])
        pages = tables[np.repeat(np.arange(len(tables)), lengths), places // cache.page]
        self.pages, self.offsets, self.tables = (
            to_device(torch.from_numpy(x), device) for x in (pages, places % cache.page, tables)
        )
        self._masks: dict[int | None, list[Tensor]] = {}  # by window, made by the first layer that has it

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.cache.layer(layer, k)
        keys[self.pages, :, self.offsets] = k.transpose(0, 1)
        values[self.pages, :, self.offsets] = v.transpose(0, 1)
        masks, parts = self._mask(params.window, q.dtype), []
        for query, (_, end), table, mask in zip(q.split(self.lengths, 1), self.spans, self.tables, masks, strict=True):
            pages = table[None, : -(-end // self.cache.page)]
            k_seen, v_seen = (gather_pages(x, pages, end) for x in (keys, values))
            parts.append(attend(query[None], k_seen, v_seen, params, mask=mask)[0].transpose(0, 1))
        return torch.cat(parts)

    def _mask(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """One [new tokens, keys] for each sequence."""
        if window not in self._masks:
            self._masks[window] = [
                _mask(torch.arange(a, b, device=self.device), b, window, dtype) for a, b in self.spans
            ]
        return self._masks[window]


class Decode:
    """Attention of one new token for each sequence, at these positions, of which `tables` has the pages.

    Gathers pages for sequences of similar length together, so that one that is long does not make all others long.
    """

    def __init__(self, cache: KVCache, positions: Tensor, tables: Ints, device: torch.device) -> None:
        self.cache = cache
        self.positions, self.tables = to_device(positions, device), to_device(torch.from_numpy(tables), device)
        places = positions.numpy()
        order = np.argsort(places, kind="stable")
        _, bounds = split_slots(places[order] + 1, 0, len(order))
        self.blocks = [_Block(self, order[lo:hi], int(places[order[hi - 1]]) + 1) for lo, hi in bounds]
        rows = torch.arange(len(places), device=device)
        self.pages, self.offsets = self.tables[rows, self.positions // cache.page], self.positions % cache.page
        # From the order of the blocks to that of the sequences.
        self.back = to_device(torch.from_numpy(np.argsort(order, kind="stable")), device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        both = self.cache.layer(layer, k)
        both[:, self.pages, :, self.offsets] = torch.stack((k, v)).permute(2, 0, 1, 3)
        keys, values = both
        query = q.transpose(0, 1)[:, :, None]  # [sequences, heads, 1, dim]
        parts = [block(query, keys, values, params) for block in self.blocks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[self.back]


class _Block:
    """Some sequences, and as many keys as the longest of them has."""

    def __init__(self, whole: Decode, rows: Ints, keys: int) -> None:
        self.rows, self.keys = to_device(torch.from_numpy(rows), whole.positions.device), keys
        self.positions = whole.positions[self.rows]
        self.table = whole.tables[self.rows, : -(-keys // whole.cache.page)]
        self._masks: dict[int | None, Tensor] = {}  # by window, made by the first layer that has it

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        k_seen, v_seen = (gather_pages(x, self.table, self.keys) for x in (keys, values))
        return attend(query[self.rows], k_seen, v_seen, params, mask=self._mask(params.window, query.dtype))[:, :, 0]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            mask = _mask(self.positions, self.keys, window, dtype)
            self._masks[window] = mask[:, None, None]  # [sequences, 1, 1, keys]
        return self._masks[window]


def _mask(positions: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Returns what is added to the scores of tokens at these positions: [positions, keys], -inf for what is hidden."""
    key = torch.arange(keys, device=positions.device)
    hidden = key > positions[:, None]
    if window is not None:
        hidden |= key <= positions[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


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
    # Copied once; a CPU takes a multiple of the time for x[table], and a second copy to join the pages.
    if table.shape[1] == 1:
        return x[:, :, :keys].index_select(0, table[:, 0])
    (sequences, _), heads = table.shape, x.shape[1]
    rows = table[:, None] * heads + torch.arange(heads, device=x.device)[:, None]  # [sequences, heads, pages]
    pages = x.flatten(0, 1).index_select(0, rows.flatten())
    return pages.view(sequences, heads, -1, x.shape[3])[:, :, :keys]
