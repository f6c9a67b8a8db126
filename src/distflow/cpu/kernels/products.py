"""Matrix products in float32.

A weight [rows, dim] is read fastest if PANEL rows of it are interleaved, element by element: that is a panel, and the
weight is `panels` [rows / PANEL, dim, PANEL].
"""

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from distflow.cpu.kernels.compiled import compiled

_F = np.float32
PANEL = 16
SUM = 256  # terms of a partial sum: a sum of partial sums loses less to rounding
_ROWS = 96  # rows of x, of which SUM columns stay in the CPU's cache
_PANELS = 16  # of a weight, so that their columns of `out` stay there as well
_PACKED = 32  # panels of a matrix that are packed at once, SUM of its rows
_ALIASED = 1024  # elements: rows a multiple of this apart compete for the same cache lines


def _block(transposed: bool) -> Any:
    """Makes a copy of PANEL numbers that lie one after the other, or of PANEL times PANEL of them, transposed: from
    x[i, j] on to out[k, m] on."""

    @intrinsic
    def copy(context, x, i, j, out, k, m):
        def code(context, b, signature, arguments):
            kinds = signature.args
            vector, count = ir.VectorType(ir.FloatType(), PANEL), PANEL if transposed else 1

            def places(at):
                array = context.make_array(kinds[at])(context, b, arguments[at])
                first = cgutils.get_item_pointer(context, b, kinds[at], array, arguments[at + 1 : at + 3])
                gap = cgutils.unpack_tuple(b, array.strides)[0]
                for row in range(count):
                    yield b.bitcast(cgutils.pointer_add(b, first, b.mul(gap, gap.type(row))), vector.as_pointer())

            rows = [b.load(place, align=4) for place in places(0)]
            step = 1
            while step < count:  # swaps the two blocks beside the diagonal of each 2 step × 2 step numbers
                near = [c if not c & step else PANEL + (c ^ step) for c in range(PANEL)]
                far = [c ^ step if not c & step else PANEL + c for c in range(PANEL)]
                whole = ir.VectorType(ir.IntType(32), PANEL)
                for row in range(count):
                    if not row & step:
                        pair = rows[row], rows[row | step]
                        rows[row] = b.shuffle_vector(*pair, ir.Constant(whole, near))
                        rows[row | step] = b.shuffle_vector(*pair, ir.Constant(whole, far))
                step *= 2
            for row, place in zip(rows, places(3), strict=True):
                b.store(row, place, align=4)
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp, out, types.intp, types.intp), code

    return copy


_copy_some, _transpose = _block(False), _block(True)


@compiled(set())
def copy(x, out):
    """Copies x [n, dim], which may lie transposed, into the first rows and columns of `out`."""
    n, dim = x.shape
    down, right = n - n % PANEL, dim - dim % PANEL
    if x.strides[1] == 4:
        down = n
        for i in range(n):
            for d in range(0, right, PANEL):
                _copy_some(x, i, d, out, i, d)
    elif x.strides[0] == 4:
        other = x.T
        for i in range(0, down, PANEL):
            for d in range(0, right, PANEL):
                _transpose(other, d, i, out, i, d)
    else:
        down = 0
    for i in range(n):
        for d in range(right if i < down else 0, dim):
            out[i, d] = x[i, d]


@compiled(set(), inline=True)
def aligned(size):
    """Memory in which no panel's row lies in two cache lines."""
    room = np.empty(size + PANEL, _F)
    skip = -room.ctypes.data // 4 % PANEL
    return room[skip : skip + size]


@compiled(set())
def to_panel(columns, panel):
    """Copies columns [dim, at most PANEL] into a panel [dim, PANEL]."""
    copy(columns, panel)
    panel[:, columns.shape[1] :] = _F(0)


@compiled(set())
def pack(panels):
    """Packs a weight [n × PANEL rows, dim] into panels, in its own memory, which `panels` [n, dim, PANEL] views."""
    count, dim, _ = panels.shape
    rows = np.empty((PANEL, dim), _F)
    for p in range(count):
        rows[:] = panels[p].reshape(PANEL, dim)
        to_panel(rows.T, panels[p])


@compiled(set())
def unpack(panels):
    count, dim, _ = panels.shape
    panel = np.empty((dim, PANEL), _F)
    for p in range(count):
        panel[:] = panels[p]
        copy(panel.T, panels[p].reshape(PANEL, dim))


# Tiles, rows × panels: as many as there are registers for. AVX-512 has 32 of 16 floats, AVX2 has 16 of 8. A number of x
# is read once for all panels of a tile, and those of the weight once for all rows: reading is not to take longer than
# multiplying. A row's sums are the same in every tile.
_AVX512 = bool(get_host_cpu_features().get("avx512f"))
_HIGH, _MIDDLE, _LOW, _ROW = ((12, 2), (8, 2), (4, 4), (1, 4)) if _AVX512 else ((6, 1), (4, 1), (2, 2), (1, 4))
_WIDEST = 4
_CLOSE = 4  # rows that share a pointer


def _tile(height: int, width: int) -> Any:
    """Makes a tile of a product that stays in registers, which no compiler makes of a loop by itself: `height` rows of
    `out` from row i on, the columns of `width` panels from p on: x · the rows of the panels from `first` on, plus `out`
    unless fresh.
    """

    @intrinsic
    def tile(context, x, panels, first, out, fresh, i, p):
        def code(context, b, signature, arguments):
            x, panels, first, out, fresh, i, p = arguments
            kinds = signature.args
            x, panels, out = (context.make_array(kinds[k])(context, b, a) for k, a in ((0, x), (1, panels), (3, out)))
            number, whole = ir.FloatType(), ir.IntType(32)
            vector = ir.VectorType(number, PANEL)
            undefined, zeros = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(whole, PANEL), [0] * PANEL)

            def constant(n):
                return ir.Constant(i.type, n)

            def times(one, other):
                return b.mul(one, constant(other) if isinstance(other, int) else other)

            def number_at(address, place):
                return b.gep(address, [place], source_etype=number)

            def vector_at(address, place):
                return b.bitcast(number_at(address, place), vector.as_pointer())

            def distance(array):
                return b.sdiv(cgutils.unpack_tuple(b, array.strides)[0], constant(4))

            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
            fetch = b.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            rows = [b.add(i, constant(r)) for r in range(height)]
            columns = [b.add(p, constant(c)) for c in range(width)]
            gap = distance(x)
            lines = [cgutils.alloca_once_value(b, number_at(x.data, times(row, gap))) for row in rows[::_CLOSE]]
            opaque = ir.InlineAsm(ir.FunctionType(x.data.type, [x.data.type]), "", "=r,0", side_effect=False)
            depth = cgutils.unpack_tuple(b, x.shape)[1]
            dim = cgutils.unpack_tuple(b, panels.shape)[1]
            starts = [number_at(panels.data, times(b.add(times(c, dim), first), PANEL)) for c in columns]
            # The first rows fetch the panels of the next tile; others would push their own out of the cache.
            ahead = b.select(b.icmp_signed("==", i, constant(0)), times(dim, width * PANEL), constant(0))
            coming = [number_at(start, ahead) for start in starts]
            outs = [number_at(out.data, times(row, distance(out))) for row in rows]
            targets = [[vector_at(line, times(c, PANEL)) for c in columns] for line in outs]
            sums = [[cgutils.alloca_once_value(b, ir.Constant(vector, None)) for _ in columns] for _ in rows]
            with cgutils.for_range(b, depth) as loop:
                at = times(loop.index, PANEL)
                weights = [b.load(vector_at(start, at), typ=vector, align=4) for start in starts]
                for place in coming:  # for reading, high locality, data cache
                    b.call(fetch, [b.bitcast(number_at(place, at), byte), whole(0), whole(3), whole(1)])
                # A few pointers move along x, and the rows between are a multiple of their distance away, which is part
                # of an instruction. A compiler that knew how near they are would compute the address of every row.
                near = [b.call(opaque, [b.load(line)]) for line in lines]
                for r, totals in enumerate(sums):
                    place = number_at(near[r // _CLOSE], times(gap, r % _CLOSE))
                    one = b.insert_element(undefined, b.load(place, typ=number), whole(0))
                    same = b.shuffle_vector(one, undefined, zeros)
                    for weight, total in zip(weights, totals, strict=True):
                        product = b.fmul(same, weight, flags=("contract",))
                        b.store(b.fadd(product, b.load(total, typ=vector), flags=("contract",)), total)
                for line, place in zip(lines, near, strict=True):
                    b.store(number_at(place, constant(1)), line)
            pairs = [pair for t, s in zip(targets, sums, strict=True) for pair in zip(t, s, strict=True)]
            with b.if_else(fresh) as (then, otherwise):
                with then:
                    for target, total in pairs:
                        b.store(b.load(total, typ=vector), target, align=4)
                with otherwise:
                    for target, total in pairs:
                        b.store(b.fadd(b.load(total, typ=vector), b.load(target, typ=vector, align=4)), target, align=4)
            return context.get_dummy_value()

        integer = types.intp
        return types.void(x, panels, integer, out, types.boolean, integer, integer), code

    return tile


_high, _middle, _low, _row = (_tile(*shape) for shape in (_HIGH, _MIDDLE, _LOW, _ROW))
_high_1, _low_1, _row_1 = (_tile(height, 1) for height, _ in (_HIGH, _LOW, _ROW))


@compiled(set())
def multiply_block(x, panels, first, out, fresh):
    """Multiplies a block of x, [at most _ROWS, at most SUM]."""
    n, count = len(x), len(panels)
    high = n - n % _HIGH[0]
    middle = n - (n - high) % _MIDDLE[0]
    low = n - (n - middle) % _LOW[0]
    wide = count - count % _WIDEST
    for p in range(0, wide, _WIDEST):
        for c in range(p, p + _WIDEST, _HIGH[1]):
            for i in range(0, high, _HIGH[0]):
                _high(x, panels, first, out, fresh, i, c)
        for c in range(p, p + _WIDEST, _MIDDLE[1]):
            for i in range(high, middle, _MIDDLE[0]):
                _middle(x, panels, first, out, fresh, i, c)
        for c in range(p, p + _WIDEST, _LOW[1]):
            for i in range(middle, low, _LOW[0]):
                _low(x, panels, first, out, fresh, i, c)
        for i in range(low, n):
            _row(x, panels, first, out, fresh, i, p)
    for p in range(wide, count):
        for i in range(0, high, _HIGH[0]):
            _high_1(x, panels, first, out, fresh, i, p)
        for i in range(high, low, _LOW[0]):
            _low_1(x, panels, first, out, fresh, i, p)
        for i in range(low, n):
            _row_1(x, panels, first, out, fresh, i, p)


@compiled(set())
def _apart(x):
    """Returns whether rows have to be copied: they lie transposed, or so that many compete for the same cache lines."""
    return x.strides[1] != 4 or (len(x) > _HIGH[0] and x.strides[0] // 4 % _ALIASED == 0)


@compiled(set())
def _multiply_whole(x, panels, out, fresh):
    n, dim = x.shape
    apart, block = _apart(x), np.empty((min(n, _ROWS), SUM + PANEL), _F)
    for start in range(0, len(panels), _PANELS):
        part, to = panels[start : start + _PANELS], out[:, start * PANEL : (start + _PANELS) * PANEL]
        for low in range(0, n, _ROWS):
            high = min(low + _ROWS, n)
            for first in range(0, dim, SUM):
                rows = x[low:high, first : min(first + SUM, dim)]
                if apart:
                    copy(rows, block)
                    rows = block[: high - low, : min(SUM, dim - first)]
                multiply_block(rows, part, first, to[low:high], fresh and first == 0)


@compiled(set())
def _multiply(x, panels, out, fresh):
    """out = x · the panels, or that added to `out`, which may have only some columns of the last panel"""
    whole = out.shape[1] // PANEL
    _multiply_whole(x, panels[:whole], out[:, : whole * PANEL], fresh)
    if whole < len(panels):
        edge, some = out[:, whole * PANEL :], np.empty((len(x), PANEL), _F)
        some[:, : edge.shape[1]] = edge
        _multiply_whole(x, panels[whole:], some, fresh)
        edge[:] = some[:, : edge.shape[1]]


@compiled(set())
def linear(x, weights, bias, out):
    """out = x · each of the packed weights, side by side, + bias. A weight is its panels, the panel of its last rows if
    they are fewer than PANEL, and its number of rows."""
    at = 0
    for panels, last, width in weights:
        whole, end = at + len(panels) * PANEL, at + width
        _multiply(x, panels, out[:, at:whole], True)
        _multiply(x, last, out[:, whole:end], True)
        at = end
    if len(bias):
        out += bias


@compiled(set())
def multiply(a, b, out, fresh):
    """out = a [n, dim] · b [dim, columns], or that added to `out`; a and b may lie transposed"""
    dim, columns = b.shape
    room = aligned(_PACKED * PANEL * min(dim, SUM))
    for start in range(0, columns, _PACKED * PANEL):
        end = min(start + _PACKED * PANEL, columns)
        count = (end - start + PANEL - 1) // PANEL
        for first in range(0, dim, SUM):
            last = min(first + SUM, dim)
            panels = room[: count * (last - first) * PANEL].reshape(count, last - first, PANEL)
            for p in range(count):
                to_panel(b[first:last, start + p * PANEL : min(start + (p + 1) * PANEL, end)], panels[p])
            _multiply(a[:, first:last], panels, out[:, start:end], fresh and first == 0)
