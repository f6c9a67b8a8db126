"""What torch's flash attention computes, sequence by sequence in float32, for devices that have no such kernel.

It refuses what CUDA's kernel would refuse: lengths and block tables that are not int32, pages that are not a multiple
of 256 tokens, an innermost dimension that is not dense.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from distflow.model import varlen

PAGE = 256


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """`torch.ops.aten._flash_attention_forward`; NaN where no query is."""
    assert not dropout
    assert not debug
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    window = _window(is_causal, window_size_left, window_size_right)
    for queries, keys, values in _sequences(q, k, v, ends_q, ends_k, max_q, max_k, seqused_k, block_table):
        out[queries] = _attend(_wide(q[queries]), _wide(keys), _wide(values), scale, window).to(q.dtype)
    nothing = torch.zeros(2, dtype=torch.uint64)
    return out, torch.zeros(q.shape[1], len(q)), nothing, nothing, torch.empty(0, dtype=q.dtype)


def forward_in_place(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, sums, *_ = forward(*args, **kwargs)
    out.copy_(result)
    return sums


def backward(
    d: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """`torch.ops.aten._flash_attention_backward`."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    window = _window(is_causal, window_size_left, window_size_right)
    for (a, b), (first, end) in _spans(ends_q, ends_k):
        rows = slice(a, b), slice(first, end), slice(first, end)
        q_part, k_part, v_part = (_wide(x[at]) for x, at in zip((q, k, v), rows, strict=True))
        parts = _attend_backward(q_part, k_part, v_part, _wide(d[a:b]), scale, window)
        for grad, at, part in zip(grads, rows, parts, strict=True):
            grad[at] = part.to(grad.dtype)
    return tuple(grads)


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], scale: float | None) -> Tensor:
        lengths, (left, right) = options[:4], options[4]
        ctx.lengths, ctx.options = lengths, {"scale": scale, "window_size_left": left, "window_size_right": right}
        more: Any = 0.0, left == -1, False
        out = forward(q, k, v, *lengths, *more, **ctx.options)[0]
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        more: Any = 0.0, ctx.options["window_size_left"] == -1, out, out
        return *backward(d, q, k, v, out, out, *ctx.lengths, *more, **ctx.options), None, None


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Any, scale: float | None, window_size: Any, enable_gqa: bool
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` for the CPU."""
    result: Tensor = _OnCpu.apply(q, k, v, (*lengths, window_size), scale)
    return result


@contextmanager
def on_cpu() -> Iterator[None]:
    """Gives the CPU the kernel, for any dtype."""
    replaced = patch.object(varlen, "varlen_attn", varlen_attn), patch.object(varlen, "_forward", forward)
    with replaced[0], replaced[1], patch.object(varlen, "has_kernel", lambda *_: True):
        yield


KERNELS = {
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_in_place,
    "_flash_attention_backward": backward,
}


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """Returns how many keys before and after its own place a query sees."""
    many = 1 << 40
    before, after = (many if side is None or side < 0 else side for side in (left, right))
    return before, 0 if is_causal else after


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """q [queries, heads, dim] to k, v [keys, kv heads, dim]; the last query is at the place of the last key."""
    return torch.einsum("hqk,khd->qhd", _weights(q, k, scale, window), _repeated(v, q))


def _weights(q: Tensor, k: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    place = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    hidden = (key < place - window[0]) | (key > place + window[1])
    scores = torch.einsum("qhd,khd->hqk", q, _repeated(k, q)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()  # a query without a key gets 0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _attend_backward(
    q: Tensor, k: Tensor, v: Tensor, d: Tensor, scale: float | None, window: tuple[int, int]
) -> tuple[Tensor, ...]:
    # By hand: autograd is off in the backward pass of a custom operation.
    weights, factor = _weights(q, k, scale, window), q.shape[-1] ** -0.5 if scale is None else scale
    d_weights = torch.einsum("qhd,khd->hqk", d, _repeated(v, q))
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * factor
    d_q = torch.einsum("hqk,khd->qhd", d_scores, _repeated(k, q))
    d_k, d_v = torch.einsum("hqk,qhd->khd", d_scores, q), torch.einsum("hqk,qhd->khd", weights, d)
    return d_q, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (d_k, d_v))


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor | None,
    max_q: int,
    max_k: int,
    used: Tensor | None,
    table: Tensor | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the queries of each sequence, its keys and its values."""
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "the innermost dimension has gaps"
    assert all(x is None or x.dtype == torch.int32 for x in (ends_q, ends_k, used, table)), "not int32"
    if table is None:
        assert ends_k is not None
        assert used is None
        for (a, b), (first, end) in _spans(ends_q, ends_k):
            assert b - a <= max_q
            assert end - first <= max_k
            yield slice(a, b), k[first:end], v[first:end]
        return
    assert used is not None
    assert k.shape[1] % PAGE == 0, f"pages of {k.shape[1]} tokens"
    for (a, b), length, pages in zip(pairwise(ends_q.tolist()), used.tolist(), table.long(), strict=True):
        assert length <= max_k
        needed = pages[: -(-length // k.shape[1])]
        yield slice(a, b), k[needed].flatten(0, 1)[:length], v[needed].flatten(0, 1)[:length]


def _spans(ends_q: Tensor, ends_k: Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    return zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
