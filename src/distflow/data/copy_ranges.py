"""Copy many runs of bytes from some flat tensors to another, in as few operations as there are long runs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints

SHORT = 512  # bytes: if runs are shorter on average, copying through an index beats a slice for each

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def copy_runs(sources: Sequence[Tensor], starts: Ints, out: Tensor, places: Ints, sizes: Ints) -> None:
    """out[places[f, i] : …] = sources[f][starts[f, i] : …], `sizes[f, i]` bytes each, for all f and i; [sources, runs].

    All in bytes. `out` is a flat uint8 tensor; where a source has wider elements, its numbers are multiples of them.
    """
    if not sizes.any():
        return
    # Join neighbours that are neighbours on both sides.
    apart = np.ones(sizes.shape, bool)
    apart[:, 1:] = starts[:, 1:] != starts[:, :-1] + sizes[:, :-1]
    apart[:, 1:] |= places[:, 1:] != places[:, :-1] + sizes[:, :-1]
    first = np.flatnonzero(apart)
    which, size = first // sizes.shape[1], np.add.reduceat(sizes.ravel(), first)
    start, place = starts.ravel()[first], places.ravel()[first]
    by_slice = np.zeros(len(sources), bool)
    if out.device.type == "cpu":
        runs = np.bincount(which, size > 0, len(sources))
        by_slice = sizes.sum(1) >= SHORT * runs
        arrays, room = [s.view(torch.uint8).numpy() for s in sources], out.numpy()
        long = np.flatnonzero(by_slice[which])
        for f, a, b, n in zip(*(x[long].tolist() for x in (which, start, place, size)), strict=True):
            room[b : b + n] = arrays[f][a : a + n]
    for f in np.flatnonzero(~by_slice).tolist():
        mine = which == f
        _by_index(sources[f], start[mine], out, place[mine], size[mine])


def _by_index(source: Tensor, starts: Ints, out: Tensor, places: Ints, sizes: Ints) -> None:
    width = source.element_size()
    counts = sizes // width
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    take, put = (torch.from_numpy(np.repeat(at // width, counts) + within).to(out.device) for at in (starts, places))
    # By width alone: some dtypes can be copied but not indexed.
    out.view(_SAME_WIDTH[width])[put] = source.view(_SAME_WIDTH[width])[take]
