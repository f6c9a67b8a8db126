"""Additive checksums: the checksums of a parameter's parts add up to that of the parameter, however it is cut.

Each rank reads only its own part. The bits of an element are weighted by an odd number for its row times one for its
column, modulo 2^64: this detects a change of any single element, and an element in the wrong place.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from distflow.device.sizes import sizes_of
from distflow.util.copies import to_device
from distflow.util.seeds import mix
from distflow.weights.shards import Box, Shards, TensorSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes


def checksum(part: Tensor, box: Box) -> Tensor:
    """Returns the checksum, [], of the part `box` of a parameter."""
    bits = part.detach().view(_BITS[part.dtype.itemsize])
    if not box:
        return bits.to(torch.int64)
    *outer, last = [_factors(dim, low, high, part.device) for dim, (low, high) in enumerate(box)]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    rows = max(1, sizes_of(part.device.type).checksum // max(1, prod(part.shape[1:])))
    for first in range(0, len(part) if outer else 1, rows):
        block = bits[first : first + rows] if outer else bits
        # Products modulo 2^32 suffice, as odd factors are invertible, and are twice as fast.
        block = (block.to(torch.int32) * last.to(torch.int32)).sum(-1, dtype=torch.int64)
        for factor in reversed(outer[1:]):
            block = (block * factor).sum(-1)
        total += (block * outer[0][first : first + rows]).sum() if outer else block
    return total


def checksums(
    specs: Sequence[TensorSpec], shards: Shards, rank: int, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the checksums, [specs], of this rank's parts of the parameters, in `dtype`."""
    sums = [checksum(parts[spec.name].to(dtype), shards.box(spec, rank)) for spec in specs]
    return torch.stack(sums).cpu() if sums else torch.empty(0, dtype=torch.int64)


def counted(specs: Sequence[TensorSpec], shards: Shards, rank: int) -> list[bool]:
    """Returns, for each parameter, whether this rank's checksum counts; over a replica each element counts once."""
    replica = shards.layout.replica_of(rank)
    assert replica is not None
    first = shards.layout.replicas[replica][0] == rank  # counts what tensor parallelism does not cut
    return [(first or shards.cuts(s)) and bool(s.shape or replica % shards.shard == 0) for s in specs]


def _factors(dim: int, low: int, high: int, device: torch.device) -> Tensor:
    """Returns an odd random number for each index [low, high) of a dimension."""
    with np.errstate(over="ignore"):
        words = mix(np.arange(low, high, dtype=np.uint64) + (np.uint64(dim) << np.uint64(48))) | np.uint64(1)
    return to_device(torch.from_numpy(words.view(np.int64)), device)
