"""Decoding steps that the device has recorded: the host then asks for a whole one at once instead of each kernel."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.rollout.builtin.device_cache import DeviceCache, PagedAttention, numbers_of
from distflow.rollout.builtin.kv_cache import table_of
from distflow.util.arrays import Ints
from distflow.util.copies import fill

WORTH = 16  # steps of a shape before it is recorded, which takes as long as some; until then kernels are tuned, too
_STEP = 64  # sequences: sizes are powers of two up to it, then its multiples

Hidden = Callable[[Tensor, Tensor, PagedAttention], Tensor]  # tokens [n], positions [n] → what the output layer reads


class DecodingGraphs:
    """Computes the hidden states of one new token for each sequence. Sequences are filled up to one of few sizes, so
    that shapes repeat. It is for the weights and the cache that there are now."""

    def __init__(self, hidden: Hidden, cache: DeviceCache, device: torch.device) -> None:
        self.hidden, self.cache, self.device = hidden, cache, device
        self.module: Any = torch.get_device_module(device)
        self._uses: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def __call__(self, tokens: Tensor, places: Ints, tables: Ints) -> Tensor | None:
        """Returns hidden states [n, hidden] for tokens at these places, until the next call; None: it has not recorded
        a step like this."""
        ends, count = places + 1, len(places)
        table = table_of(tables, ends, self.cache.page)
        shape = padded(count), 1 << (table.shape[1] - 1).bit_length()
        self._uses[shape] += 1
        if self._uses[shape] <= WORTH:
            return None
        # What fills it up repeats the last sequence, and writes what that writes.
        rows = np.minimum(np.arange(shape[0]), count - 1)
        wide = np.zeros(shape, np.int64)
        wide[:, : table.shape[1]] = table[rows]
        numbers = numbers_of(places[rows], ends[rows], wide, self.cache.page)
        given = torch.from_numpy(numbers), torch.stack((tokens, torch.from_numpy(places)))[:, torch.from_numpy(rows)]
        if shape not in self._recorded:
            self._recorded[shape] = _Recorded(self, shape, *given)
        return self._recorded[shape](*given)[:count]


class _Recorded:
    """A step of one shape, and the memory that it reads and writes."""

    def __init__(self, graphs: DecodingGraphs, shape: tuple[int, int], numbers: Tensor, rows: Tensor) -> None:
        self.numbers, self.rows = (torch.empty_like(x, device=graphs.device) for x in (numbers, rows))
        self._fill(numbers, rows)
        self.graph = graphs.module.CUDAGraph()
        # Other threads of the worker may use the device meanwhile.
        with graphs.module.graph(self.graph, capture_error_mode="thread_local"):
            attention = PagedAttention.of_single_tokens(graphs.cache, self.numbers, shape)
            self.out = graphs.hidden(self.rows[0], self.rows[1], attention)

    def __call__(self, numbers: Tensor, rows: Tensor) -> Tensor:
        self._fill(numbers, rows)
        self.graph.replay()
        return self.out

    def _fill(self, numbers: Tensor, rows: Tensor) -> None:
        fill(self.numbers, numbers)
        fill(self.rows, rows)


def padded(sequences: int) -> int:
    return 1 << (sequences - 1).bit_length() if sequences <= _STEP else -(-sequences // _STEP) * _STEP


def can_record(device: torch.device) -> bool:
    """Returns whether torch records what this device is asked to do."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "CUDAGraph")
