"""Products of tensors by the kernels, and by torch where these do not fit."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from distflow.cpu import Floats, as_numpy, in_threads, kernels_for
from distflow.util.arrays import Ints

_NONE = np.zeros(0, np.float32)
Packed = tuple[Floats, Floats, int]  # panels, the last panel if it is not full, and the number of rows


class PackedWeight:
    """A weight [rows, dim], to be read by kernels as panels, which are in its own memory while it is packed."""

    def __init__(self, weight: Tensor) -> None:
        kernels = kernels_for(weight)
        assert kernels is not None
        self.kernels, self.array = kernels, as_numpy(weight)
        rows, dim = self.array.shape
        self.whole = rows - rows % kernels.PANEL
        self.panels = self.array[: self.whole].reshape(-1, dim, kernels.PANEL)
        self.last = np.zeros((int(self.whole < rows), dim, kernels.PANEL), np.float32)

    @staticmethod
    def fits(weight: Tensor) -> bool:
        return weight.is_contiguous() and as_numpy(weight).flags.writeable

    @property
    def parts(self) -> Packed:
        return self.panels, self.last, len(self.array)

    def pack(self) -> None:
        if len(self.last):
            self.last[0, :, : len(self.array) - self.whole] = self.array[self.whole :].T
        self.kernels.pack(self.panels)

    def unpack(self) -> None:
        self.kernels.unpack(self.panels)

    def rows(self, index: Ints) -> Floats:
        """Returns rows of the packed weight, as an embedding reads them."""
        rows = self.array[index]  # the rows that are not in panels
        packed = index < self.whole
        panel, lane = np.divmod(index[packed], self.kernels.PANEL)
        rows[packed] = self.panels[panel, :, lane]
        return rows

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """out = x [n, in] · the packed weight + bias, without a gradient."""
        given, to, row = as_numpy(x.contiguous()), as_numpy(out), _NONE if bias is None else as_numpy(bias)

        def part(some: slice) -> None:
            self.kernels.linear(given[some], (self.parts,), row, to[some])

        in_threads(part, len(x), x.numel() * len(self.array))
        return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer."""
    if kernels_for(x, weight) and x.numel() and weight.numel():
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return functional.linear(x, weight, bias)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of x [n, in] up to each of `ends` by one matrix of weight [groups, out, in]."""
    return _GroupedLinear.apply(x, weight, ends)  # type: ignore[no-any-return, no-untyped-call]


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [n, m] · b [m, k], without a gradient."""
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    return out if _in_kernel(a, b, out, True) else torch.mm(a, b, out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Adds a [n, m] · b [m, k] to `out`, without a gradient."""
    if not _in_kernel(a, b, out, False):
        out.addmm_(a, b)


def _in_kernel(a: Tensor, b: Tensor, out: Tensor, fresh: bool) -> bool:
    kernels = kernels_for(a, b, out)
    if kernels is None or not all(t.numel() for t in (a, b, out)):
        return False
    x, y, to, panel = as_numpy(a), as_numpy(b), as_numpy(out), kernels.PANEL

    def part(panels: slice) -> None:
        columns = slice(panels.start * panel, panels.stop * panel)
        kernels.multiply(x, y[:, columns], to[:, columns], fresh)

    in_threads(part, -(-b.shape[1] // panel), a.numel() * b.shape[1])
    return True


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = multiply(x.flatten(0, -2), weight.T)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = d.flatten(0, -2)
        return (
            multiply(rows, weight).view(x.shape) if needs_x else None,
            multiply(rows.T, x.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends.tolist()
        out = x.new_empty(len(x), weight.shape[1])
        for matrix, rows in zip(weight, ranges(ctx.ends), strict=True):
            multiply(x[rows], matrix.T, out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = (torch.empty_like(t) if t.requires_grad else None for t in (x, weight))
        for i, rows in enumerate(ranges(ctx.ends)):
            if d_x is not None:
                multiply(d[rows], weight[i], d_x[rows])
            if d_weight is not None:
                multiply(d[rows].T, x[rows], d_weight[i])
        return d_x, d_weight, None


def ranges(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
