"""Attention of sequences of different lengths in one kernel: torch's flash attention, on devices that have it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from distflow.model.torch_kernels import torch_has
from distflow.util.copies import to_device

_WIDEST_HEAD = 256
_forward = torch.ops.aten._flash_attention_forward  # what varlen_attn calls; it adds what a gradient needs


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Returns whether torch has the kernel for tensors like these. It knows no soft cap of the scores."""
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= _WIDEST_HEAD and _is_for(device)


@cache
def _is_for(device: torch.device) -> bool:
    old = torch.cuda.is_available() and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return not old and torch_has("aten::_flash_attention_forward", device)


@dataclass(frozen=True)
class Bounds:
    """Where each sequence begins in a row of queries and in a row of keys, and where the last one ends."""

    queries: Tensor  # [sequences + 1]
    keys: Tensor
    most_queries: int  # of a sequence
    most_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "Bounds":
        ends = [list(accumulate(lengths, initial=0)) for lengths in (queries, keys)]
        both = to_device(torch.tensor(ends, dtype=torch.int32), device)  # in one copy
        return cls(both[0], both[1], max(queries), max(keys))


def causal_window(window: int | None) -> tuple[int, int]:
    """Returns how many keys before and after its own place a query sees; -1: all."""
    return (-1 if window is None else window - 1), 0


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None, window: int | None) -> Tensor:
    """Causal attention of q [queries, heads, dim] to k, v [keys, kv heads, dim] → [queries, heads, dim].

    The queries of a sequence are at its last places.
    """
    lengths = bounds.queries, bounds.keys, bounds.most_queries, bounds.most_keys
    out = varlen_attn(q, k, v, *lengths, scale=scale, window_size=causal_window(window), enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds,
    used: Tensor,
    blocks: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """The same for k, v [pages, page, kv heads, dim], without a gradient: row i of `blocks` has the pages of sequence
    i, which has `used` [sequences] keys.

    A sequence gets the same whatever others there are: its keys are read in one go.
    """
    left, right = causal_window(window)
    lengths = bounds.queries, bounds.keys, bounds.most_queries, bounds.most_keys
    result = _forward(
        q,
        k,
        v,
        *lengths,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=used,
        block_table=blocks,
        num_splits=1,
    )
    out: Tensor = result[0]
    return out
