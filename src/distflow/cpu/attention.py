"""Attention by the kernels: keys and values as panels in pages, and what a trainer needs beyond that."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.cpu import Floats, as_numpy, in_threads, kernels_for
from distflow.util.arrays import Ints

PAGE = 256  # the parts of sums over keys; a sequence that has several pages has them of this size
_NONE = np.zeros((0, 0), np.float32)
Options = tuple[float | None, int | None, float | None]  # scale, window and soft cap of the scores


class Panels:
    """Keys and values of a layer, in pages."""

    def __init__(self, pages: int, page: int, like: Tensor) -> None:
        """`like`: keys [.., groups, dim]."""
        kernels = kernels_for(like)
        assert kernels is not None
        (groups, dim), panel = like.shape[-2:], kernels.PANEL
        self.kernels = kernels
        # torch's memory is aligned, so that no row of a panel lies in two cache lines
        self.keys = as_numpy(torch.empty(pages, groups, -(-page // panel), dim, panel))
        self.values = as_numpy(torch.empty(pages, groups, -(-dim // panel), page, panel))

    def write(self, k: Tensor, v: Tensor, pages: Ints, places: Ints) -> None:
        """Writes k, v [n, groups, dim] to places of pages."""
        self.kernels.write_pages(as_numpy(k), as_numpy(v), self.keys, self.values, pages, places)

    def copy(self, sources: Ints, targets: Ints, places: int) -> None:
        """Copies the first places of pages."""
        panels = -(-places // self.keys.shape[-1])
        self.keys[targets, :, :panels] = self.keys[sources, :, :panels]
        self.values[targets, :, :, :places] = self.values[sources, :, :, :places]

    def attend(self, q: Tensor, tables: Ints, blocks: Ints, options: Options, logsums: Floats = _NONE) -> Tensor:
        """Attention of q [n, heads, dim] to what is before it, as in `kernels.attend`."""
        query = q.contiguous()
        out = torch.empty_like(query)
        arrays, numbers = (as_numpy(query), self.keys, self.values, tables), _numbers(options, q)
        to = as_numpy(out)

        def part(some: slice) -> None:
            self.kernels.attend(*arrays, blocks[some], *numbers, to, logsums)

        keys = int(blocks[:, 3].mean()) + 1
        in_threads(part, len(blocks), q.numel() * keys)
        return out


def blocks_of(starts: Ints, lengths: Ints, each: int) -> Ints:
    """Returns the blocks of queries that go together: of sequence i so many, the first at place `starts[i]`. `each`:
    heads that share keys."""
    kernels = kernels_for()
    assert kernels is not None
    size = max(1, kernels.ROWS // each)
    counts = -(-lengths // size)
    table = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(table)) - (np.cumsum(counts) - counts)[table]) * size
    first = (np.cumsum(lengths) - lengths)[table]
    low, high = first + offset, first + np.minimum(offset + size, lengths[table])
    blocks = np.stack((table, low, high, starts[table] + offset), 1)
    threads = torch.get_num_threads()  # each has some that see few keys and some that see many
    return blocks if threads == 1 else blocks[np.argsort(np.arange(len(blocks)) % threads, kind="stable")]


def has_kernel(q: Tensor) -> bool:
    return kernels_for(q) is not None


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int], options: Options) -> Tensor:
    """Causal attention of q [queries, heads, dim] to k, v [keys, groups, dim], of sequences of so many queries, which
    are at their last places, and of so many keys."""
    return _Attention.apply(q, k, v, queries, keys, options)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, queries: Sequence[int], keys: Sequence[int], options: Options
    ) -> Tensor:
        counts, lengths = np.array(queries, np.int64), np.array(keys, np.int64)
        page = min(PAGE, int(lengths.max()))
        pages = -(-lengths // page)
        panels = Panels(int(pages.sum()), page, k)
        firsts = np.cumsum(pages) - pages
        places = np.arange(len(k)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        panels.write(k, v, np.repeat(firsts, lengths) + places // page, places % page)
        logsums = torch.empty(q.shape[:2])
        blocks = blocks_of(lengths - counts, counts, q.shape[1] // k.shape[1])
        tables = firsts[:, None] + np.arange(int(pages.max()))
        out = panels.attend(q, tables, blocks, options, as_numpy(logsums))
        ctx.save_for_backward(q, k, v, out, logsums)
        ctx.counts, ctx.lengths, ctx.options = counts, lengths, options
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = saved = ctx.saved_tensors
        kernels, numbers = kernels_for(q), _numbers(ctx.options, q)
        assert kernels is not None
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        ends = [np.cumsum(n) for n in (ctx.counts, ctx.lengths)]
        spans = np.stack((ends[0] - ctx.counts, ends[0], ends[1] - ctx.lengths, ends[1]), 1)
        jobs = np.arange(len(spans) * k.shape[1])
        arrays, to = [as_numpy(x.contiguous()) for x in (d, *saved)], [as_numpy(g) for g in grads]

        def part(some: slice) -> None:
            kernels.attend_backward(*arrays, jobs[some], spans, *numbers, *to)

        in_threads(part, len(jobs), q.numel() * int(ctx.lengths.mean()))
        return *grads, None, None, None


def _numbers(options: Options, q: Tensor) -> tuple[np.float32, int, np.float32]:
    scale, window, softcap = options
    return np.float32(scale or q.shape[-1] ** -0.5), window or sys.maxsize, np.float32(softcap or 0)
