"""Attention of one new token per sequence, in a kernel."""

import sys
from types import ModuleType

import numpy as np
from torch import Tensor

from distflow.model.attention import AttentionParams
from distflow.util.arrays import Ints


def decode_attention(
    kernels: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    tables: Ints,
    positions: Ints,
    params: AttentionParams,
) -> Tensor:
    """Writes k and v [kv heads, n, dim] to the pages of `cache` and returns attention of q [heads, n, dim] to all that
    is there, [n, heads, dim]; row i of `tables` has the pages of sequence i."""
    out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    new = [x.transpose(0, 1).numpy() for x in (q, k, v)]
    window, scale = params.window or sys.maxsize, params.scale or q.shape[-1] ** -0.5
    kernels.attend(*new, cache.numpy(), tables, positions, window, np.float32(scale), out.numpy())
    return out
