"""Copy many runs of elements from one flat tensor to another, in as few operations as there are long runs."""

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SHORT = 512  # bytes: below this, copying element by element through an index beats a slice per run


def copy_runs(src: Tensor, starts: Ints, out: Tensor, positions: Ints, counts: Ints) -> None:
    """out[positions[i] : … + counts[i]] = src[starts[i] : … + counts[i]], for all i; flat, of one dtype and device."""
    starts, positions, counts = _merged(starts, positions, counts)
    total = int(counts.sum())
    if not total:
        return
    # By width alone: some dtypes can be copied but not indexed.
    src, out = src.view(_SAME_WIDTH[src.element_size()]), out.view(_SAME_WIDTH[src.element_size()])
    if src.device.type == "cpu" and total * src.element_size() >= SHORT * len(counts):
        a, b, width = src.view(torch.uint8).numpy(), out.view(torch.uint8).numpy(), src.element_size()
        ends = (positions + counts) * width
        where = zip((starts * width).tolist(), (positions * width).tolist(), ends.tolist(), strict=True)
        for from_, to, end in where:
            b[to:end] = a[from_ : from_ + end - to]
        return
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    take = torch.from_numpy(np.repeat(starts, counts) + within).to(src.device)
    if (positions[1:] == positions[:-1] + counts[:-1]).all():
        out[int(positions[0]) : int(positions[0]) + total] = src[take]
    else:
        out[torch.from_numpy(np.repeat(positions, counts) + within).to(src.device)] = src[take]


def _merged(starts: Ints, positions: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Join neighbours that are neighbours on both sides; drop empty runs."""
    if not counts.all():
        some = counts > 0
        starts, positions, counts = starts[some], positions[some], counts[some]
    if len(counts) < 2:
        return starts, positions, counts
    apart = (starts[1:] != starts[:-1] + counts[:-1]) | (positions[1:] != positions[:-1] + counts[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return starts[first], positions[first], np.add.reduceat(counts, first)
