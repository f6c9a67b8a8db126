"""Copies many byte ranges from several flat tensors into one, with as few operations as possible."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.util.arrays import Ints

SHORT = 512  # bytes: ranges that are shorter on average are faster by one indexed copy than by slices

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def copy_ranges(sources: Sequence[Tensor], starts: Ints, out: Tensor, offsets: Ints, sizes: Ints) -> None:
    """Copies `sizes[f, i]` bytes from sources[f][starts[f, i] : …] to out[offsets[f, i] : …], for all f and i.

    All numbers are bytes, [sources, ranges], and multiples of the source's element size. `out` is flat and uint8.
    """
    if not sizes.any():
        return
    # Merge ranges that are adjacent on both sides.
    apart = np.ones(sizes.shape, bool)
    apart[:, 1:] = starts[:, 1:] != starts[:, :-1] + sizes[:, :-1]
    apart[:, 1:] |= offsets[:, 1:] != offsets[:, :-1] + sizes[:, :-1]
    first = np.flatnonzero(apart)
    source, size = first // sizes.shape[1], np.add.reduceat(sizes.ravel(), first)
    start, offset = starts.ravel()[first], offsets.ravel()[first]
    by_slice = np.zeros(len(sources), bool)
    if out.device.type == "cpu":
        ranges = np.bincount(source, size > 0, len(sources))
        by_slice = sizes.sum(1) >= SHORT * ranges
        arrays, target = [s.view(torch.uint8).numpy() for s in sources], out.numpy()
        long = np.flatnonzero(by_slice[source])
        for f, a, b, n in zip(*(x[long].tolist() for x in (source, start, offset, size)), strict=True):
            target[b : b + n] = arrays[f][a : a + n]
    for f in np.flatnonzero(~by_slice).tolist():
        selected = source == f
        _copy_by_index(sources[f], start[selected], out, offset[selected], size[selected])


def _copy_by_index(source: Tensor, starts: Ints, out: Tensor, offsets: Ints, sizes: Ints) -> None:
    width = source.element_size()
    counts = sizes // width
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    take, put = (torch.from_numpy(np.repeat(at // width, counts) + within).to(out.device) for at in (starts, offsets))
    # As integers of the same width: some dtypes can be copied but not indexed.
    out.view(_SAME_WIDTH[width])[put] = source.view(_SAME_WIDTH[width])[take]
