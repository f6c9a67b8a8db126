"""Float32 kernels compiled by numba for the CPU they run on: matrix products, and what a model does between them.

Each fuses what takes torch several operations, whose overhead in a decoding step is larger than their work. They take
numpy arrays, write in place or into `out`, and run in one thread without the GIL. Only `cpu` imports this module. It is
one file because numba's cache of a compiled function is invalidated by changes in its own file, not in what it calls.

A weight [rows, dim] is read fastest if PANEL rows of it are interleaved, element by element: that is a panel, and the
weight is `panels` [rows / PANEL, dim, PANEL].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_F, _U, _I = np.float32, np.uint32, np.int32
PANEL = 16
_SUM = 256  # terms of a partial sum: a sum of partial sums loses less to rounding
_ROWS = 96  # rows of x, of which _SUM columns stay in the CPU's cache
_PANELS = 16  # of a weight, so that their columns of `out` stay there as well
_PACKED = 1 << 21  # elements of a weight that are packed at once
_ALIASED = 1024  # elements: rows a multiple of this apart compete for the same cache lines
# Sums may be reordered, as vectorisation needs; NaN and infinity are kept. A sum has a loop that writes to no array:
# where one is also written, LLVM checks at run time whether it lies close to what is read, and if so adds up one by
# one. The last bits would then depend on where memory happened to be free.
_SUMS = {"reassoc", "contract", "arcp", "nsz"}


def _compile(fastmath: set[str], inline: bool = False) -> Callable[[Any], Any]:
    """`inline`: for functions that other kernels call. Otherwise each caller would bring a copy, with sums ordered and
    products contracted a little differently, and all would use the copy that was there first: one when they are
    compiled, another when they come from the cache.
    """
    return njit(fastmath=fastmath, error_model="numpy", nogil=True, cache=True, forceinline=inline)


@_compile({"contract"}, inline=True)
def exp(x):
    """Computes e^x to the last bit or two, within 2^-126 to 2^127: 2^n times the series of the remainder."""
    x = _F(-87) if x < _F(-87) else x  # NaN stays what it is
    x = _F(88) if x > _F(88) else x
    n = np.floor(x * _F(1.4426950408889634) + _F(0.5))
    r = x - n * _F(0.693359375)  # ln 2 in two parts, of which the first times n is exact
    r = r + n * _F(2.12194440e-4)
    p = _F(1 / 5040)
    p = p * r + _F(1 / 720)
    p = p * r + _F(1 / 120)
    p = p * r + _F(1 / 24)
    p = p * r + _F(1 / 6)
    p = p * r + _F(1 / 2)
    p = p * r + _F(1)
    p = p * r + _F(1)
    return p * _I((_I(n) + _I(127)) << _I(23)).view(_F)


@_compile({"contract"}, inline=True)
def log(x):
    """Computes ln x to the last bit or two, for normal positive numbers: x = 2^n m, with m about 1."""
    bits = _F(x).view(_I)
    n = _I((bits - _I(0x3F3504F3)) >> _I(23))  # m from √½ to √2
    m = _I(bits - _I(n << _I(23))).view(_F)
    s = (m - _F(1)) / (m + _F(1))
    z = s * s
    p = _F(1 / 9)
    p = p * z + _F(1 / 7)
    p = p * z + _F(1 / 5)
    p = p * z + _F(1 / 3)
    p = p * z * s + s
    return _F(n) * _F(0.6931471805599453) + (p + p)


@_compile(set())
def _to_panel(columns, panel):
    """Copies columns [dim, at most PANEL] into a panel [dim, PANEL]."""
    width = columns.shape[1]
    for d in range(len(panel)):
        for c in range(width):
            panel[d, c] = columns[d, c]
        for c in range(width, PANEL):
            panel[d, c] = _F(0)


@_compile(set())
def pack(panels):
    """Packs a weight [n × PANEL rows, dim] into panels, in its own memory, which `panels` [n, dim, PANEL] views."""
    count, dim, _ = panels.shape
    rows = np.empty((PANEL, dim), _F)
    for p in range(count):
        rows[:] = panels[p].reshape(PANEL, dim)
        _to_panel(rows.T, panels[p])


@_compile(set())
def unpack(panels):
    count, dim, _ = panels.shape
    panel = np.empty((dim, PANEL), _F)
    for p in range(count):
        panel[:] = panels[p]
        rows = panels[p].reshape(PANEL, dim)
        for r in range(PANEL):
            for d in range(dim):
                rows[r, d] = panel[d, r]


# Tiles, rows × panels: as many as there are registers for. AVX-512 has 32 of 16 floats, AVX2 has 16 of 8. A number of x
# is read once for all panels of a tile, and those of the weight once for all rows: reading is not to take longer than
# multiplying. A row's sums are the same in every tile.
_AVX512 = bool(get_host_cpu_features().get("avx512f"))
_HIGH, _MIDDLE, _LOW, _ROW = ((12, 2), (8, 2), (4, 4), (1, 4)) if _AVX512 else ((6, 1), (4, 1), (2, 2), (1, 4))
_WIDEST = 4


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

            def line(array, row):
                gap = b.sdiv(cgutils.unpack_tuple(b, array.strides)[0], constant(4))
                return number_at(array.data, times(row, gap))

            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
            fetch = b.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            rows = [b.add(i, constant(r)) for r in range(height)]
            columns = [b.add(p, constant(c)) for c in range(width)]
            lines = [line(x, row) for row in rows]
            depth = cgutils.unpack_tuple(b, x.shape)[1]
            dim = cgutils.unpack_tuple(b, panels.shape)[1]
            starts = [number_at(panels.data, times(b.add(times(c, dim), first), PANEL)) for c in columns]
            coming = [number_at(start, times(dim, width * PANEL)) for start in starts]  # prefetched during this tile
            targets = [[vector_at(line(out, row), times(c, PANEL)) for c in columns] for row in rows]
            sums = [[cgutils.alloca_once_value(b, ir.Constant(vector, None)) for _ in columns] for _ in rows]
            with cgutils.for_range(b, depth) as loop:
                at = times(loop.index, PANEL)
                weights = [b.load(vector_at(start, at), typ=vector, align=4) for start in starts]
                for ahead in coming:  # for reading, high locality, data cache
                    b.call(fetch, [b.bitcast(number_at(ahead, at), byte), whole(0), whole(3), whole(1)])
                for start, totals in zip(lines, sums, strict=True):
                    one = b.insert_element(undefined, b.load(number_at(start, loop.index), typ=number), whole(0))
                    same = b.shuffle_vector(one, undefined, zeros)
                    for weight, total in zip(weights, totals, strict=True):
                        product = b.fmul(same, weight, flags=("contract",))
                        b.store(b.fadd(product, b.load(total, typ=vector), flags=("contract",)), total)
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


@_compile(set())
def _multiply_block(x, panels, first, out, fresh):
    """Multiplies a block of x, [at most _ROWS, at most _SUM]."""
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


@_compile(set())
def _spread(x):
    """Copies x into rows that lie one after the other, and not so that they compete."""
    n, dim = x.shape
    rows = np.empty((n, dim + PANEL), _F)[:, :dim]
    for start in range(0, dim, PANEL):  # some columns at a time, as x may lie transposed
        for i in range(n):
            for d in range(start, min(start + PANEL, dim)):
                rows[i, d] = x[i, d]
    return rows


@_compile(set())
def _multiply(x, panels, out, fresh):
    """out = x · the packed weight, or that added to `out`"""
    n, dim = x.shape
    for start in range(0, len(panels), _PANELS):
        part, to = panels[start : start + _PANELS], out[:, start * PANEL : (start + _PANELS) * PANEL]
        for low in range(0, n, _ROWS):
            high = min(low + _ROWS, n)
            for first in range(0, dim, _SUM):
                last = min(first + _SUM, dim)
                _multiply_block(x[low:high, first:last], part, first, to[low:high], fresh and first == 0)


@_compile(set())
def add_linear(x, matrices, bias, out):
    """out += bias + x · each of the packed weights, side by side"""
    if len(bias):
        out += bias
    rows = _spread(x) if x.strides[0] // 4 % _ALIASED == 0 else x
    at = 0
    for panels in matrices:
        width = len(panels) * PANEL
        _multiply(rows, panels, out[:, at : at + width], False)
        at += width


@_compile(set())
def multiply(a, b, out, fresh):
    """out = a [n, dim] · b [dim, columns], or that added to `out`; a and b may lie transposed"""
    n, dim = a.shape
    columns = b.shape[1]
    rows = _spread(a) if a.strides[1] != 4 or a.strides[0] // 4 % _ALIASED == 0 else a
    room = np.empty((max(1, min(columns, _PACKED // dim) // PANEL), dim, PANEL), _F)
    whole = columns - columns % PANEL
    for start in range(0, whole, len(room) * PANEL):
        panels = room[: (whole - start) // PANEL]
        for p in range(len(panels)):
            _to_panel(b[:, start + p * PANEL : start + (p + 1) * PANEL], panels[p])
        _multiply(rows, panels, out[:, start : start + len(panels) * PANEL], fresh)
    if whole < columns:
        _to_panel(b[:, whole:], room[0])
        some = np.empty((n, PANEL), _F)
        some[:, : columns - whole] = out[:, whole:]
        _multiply(rows, room[:1], some, fresh)
        out[:, whole:] = some[:, : columns - whole]


@_compile(_SUMS, inline=True)
def norm(x, weight, epsilon, out):
    """RMSNorm of the rows of [n, dim]."""
    n, dim = x.shape
    for i in range(n):
        row, to = x[i], out[i]
        total = _F(0)
        for d in range(dim):
            total += row[d] * row[d]
        factor = _F(1) / np.sqrt(total / _F(dim) + epsilon)
        for d in range(dim):
            to[d] = row[d] * factor * weight[d]


@_compile(_SUMS, inline=True)
def _rotate(x, heads, positions, cos, sin):
    """Applies rotary embeddings in place to the first `heads` of x [n, all heads, dim]; the first half of sin is
    negative."""
    n, _, dim = x.shape
    half = dim // 2
    for i in range(n):
        row, c, s = x[i], cos[positions[i]], sin[positions[i]]
        for h in range(heads):
            for d in range(half):
                a, b = row[h, d], row[h, half + d]
                row[h, d] = a * c[d] + b * s[d]
                row[h, half + d] = b * c[half + d] + a * s[half + d]


@_compile(_SUMS)
def norm_backward(d, x, weight, epsilon, dx, dw):
    """Gradients of `norm`; adds to `dw`."""
    n, dim = x.shape
    some = np.zeros(dim, _F)  # partial sums lose less to rounding
    for i in range(n):
        if i % 64 == 0:
            dw += some
            some[:] = _F(0)
        row, grad, to = x[i], d[i], dx[i]
        total, along = _F(0), _F(0)
        for j in range(dim):
            total += row[j] * row[j]
            along += grad[j] * weight[j] * row[j]
        factor = _F(1) / np.sqrt(total / _F(dim) + epsilon)
        along *= factor * factor * factor / _F(dim)
        for j in range(dim):
            to[j] = grad[j] * weight[j] * factor - row[j] * along
            some[j] += grad[j] * row[j] * factor
    dw += some


@_compile(_SUMS, inline=True)
def _gate_row(gate, up, out):
    for d in range(len(out)):
        out[d] = gate[d] / (_F(1) + exp(-gate[d])) * up[d]


@_compile(_SUMS)
def gate(gate, up, out):
    """silu(gate) × up"""
    for i in range(len(out)):
        _gate_row(gate[i], up[i], out[i])


@_compile(_SUMS)
def gate_backward(d, gate, up, d_gate, d_up):
    n, dim = d.shape
    for i in range(n):
        grad, a, b, to_a, to_b = d[i], gate[i], up[i], d_gate[i], d_up[i]
        for j in range(dim):
            share = _F(1) / (_F(1) + exp(-a[j]))
            to_a[j] = grad[j] * b[j] * share * (_F(1) + a[j] * (_F(1) - share))
            to_b[j] = grad[j] * a[j] * share


@_compile(_SUMS, inline=True)
def _norm_heads(x, first, last, weight, epsilon):
    for i in range(len(x)):
        norm(x[i, first:last], weight, epsilon, x[i, first:last])


@_compile(set())
def before_attention(x, weight, epsilon, matrices, bias, norms, queries, keys, positions, cos, sin, normed, qkv):
    """The part of a layer before attention: queries, keys and values of x [n, hidden] into qkv [n, heads, dim]."""
    norm(x, weight, epsilon, normed)
    flat = qkv.reshape(len(x), -1)
    flat[:] = _F(0)
    add_linear(normed, matrices, bias, flat)
    if len(norms[0]):
        _norm_heads(qkv, 0, queries, norms[0], epsilon)
        _norm_heads(qkv, queries, queries + keys, norms[1], epsilon)
    _rotate(qkv, queries + keys, positions, cos, sin)


@_compile(set())
def after_attention(x, y, out, out_bias, weight, epsilon, gate_up, gate_up_bias, down, down_bias, normed, both, gated):
    """The part of a layer after attention, whose output is y; overwrites x."""
    add_linear(y, out, out_bias, x)
    norm(x, weight, epsilon, normed)
    both[:] = _F(0)
    add_linear(normed, gate_up, gate_up_bias, both)
    inner = gated.shape[1]
    for i in range(len(both)):
        _gate_row(both[i, :inner], both[i, inner:], gated[i])
    add_linear(gated, down, down_bias, x)


# Unsigned: of a signed index that it cannot see to be positive, numba tests the sign for every key.
_1, _2, _3 = np.uintp(1), np.uintp(2), np.uintp(3)


@_compile(_SUMS)
def attend(q, k, v, cache, tables, positions, window, scale, out):
    """Attention of one token of each of n sequences: writes its k and v [n, kv heads, dim] to `cache` [2, pages, kv
    heads, page, dim], and the output for its q [n, heads, dim] to `out`. Row i of `tables` has the pages of i."""
    n, heads, dim = q.shape
    groups, size = k.shape[1], cache.shape[3]
    each = heads // groups
    query, weights = np.empty(dim, _F), np.empty(positions.max() + 1, _F)
    for i in range(n):
        end = positions[i] + 1
        start = max(0, end - window)
        first, last = start // size, (end - 1) // size  # pages
        newest, place = tables[i, last], end - 1 - last * size
        for g in range(groups):
            for d in range(dim):
                cache[0, newest, g, place, d] = k[i, g, d]
                cache[1, newest, g, place, d] = v[i, g, d]
            for h in range(g * each, (g + 1) * each):
                for d in range(dim):
                    query[d] = q[i, h, d] * scale
                peak = _F(-np.inf)
                for p in range(first, last + 1):
                    page, base = tables[i, p], p * size
                    for t in range(max(start, base), min(end, base + size)):
                        key, score = cache[0, page, g, np.uintp(t - base)], _F(0)
                        for d in range(dim):
                            score += query[d] * key[d]
                        weights[t] = score
                        peak = score if score > peak else peak
                total = _F(0)
                for t in range(start, end):
                    weights[t] = exp(weights[t] - peak)
                    total += weights[t]
                to = out[i, h]
                for d in range(dim):
                    to[d] = _F(0)
                for p in range(first, last + 1):
                    page, base = tables[i, p], p * size
                    values = cache[1, page, g]
                    t, stop = max(start, base), min(end, base + size)
                    while t + 4 <= stop:  # four at a time, so that `to` is read and written once for them
                        a0, a1, a2, a3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
                        u = np.uintp(t - base)
                        v0, v1, v2, v3 = values[u], values[u + _1], values[u + _2], values[u + _3]
                        for d in range(dim):
                            to[d] += a0 * v0[d] + a1 * v1[d] + a2 * v2[d] + a3 * v3[d]
                        t += 4
                    while t < stop:
                        a0, v0 = weights[t], values[np.uintp(t - base)]
                        for d in range(dim):
                            to[d] += a0 * v0[d]
                        t += 1
                factor = _F(1) / total
                for d in range(dim):
                    to[d] *= factor


@_compile(_SUMS, inline=True)
def _peak(row):
    peak = _F(-np.inf)
    for x in row:
        peak = x if x > peak else peak
    return peak


@_compile(_SUMS, inline=True)
def _softmax_sums(row):
    """Returns the maximum m, Σ exp(x − m), and Σ exp(x − m) (x − m)."""
    peak, total, weighted = _peak(row), _F(0), _F(0)
    for start in range(0, len(row), _SUM):
        some, far = _F(0), _F(0)
        for c in range(start, min(start + _SUM, len(row))):
            odds = exp(row[c] - peak)
            some += odds
            far += odds * (row[c] - peak)
        total += some
        weighted += far
    return peak, total, weighted


@_compile(_SUMS)
def token_logprobs(logits, targets, logprobs, entropy):
    """The log-prob of each row's target, and the row's entropy."""
    for i in range(len(logits)):
        row = logits[i]
        if not 0 <= targets[i] < len(row):
            raise IndexError("a target is not in the vocabulary")
        peak, total, weighted = _softmax_sums(row)
        size = np.log(total)
        logprobs[i] = row[targets[i]] - peak - size
        entropy[i] = size - weighted / total


@_compile(_SUMS)
def token_logprobs_backward(logits, targets, d_logprobs, d_entropy):
    """Overwrites the logits with the gradient of `token_logprobs` by them."""
    for i in range(len(logits)):
        row, d, d_e = logits[i], d_logprobs[i], d_entropy[i]
        peak, total, weighted = _softmax_sums(row)
        share = _F(1) / total
        same = d - d_e * weighted * share
        for c in range(len(row)):
            x = row[c] - peak
            row[c] = -exp(x) * share * (same + d_e * x)
        row[targets[i]] += d


@_compile(_SUMS)
def gumbel_sample(logits, keys, columns, arrivals, tokens, totals):
    """`rollout.sampling.gumbel_sample`: the token of each row that arrives first, and the logsumexp. `arrivals`
    [vocabulary] is scratch memory."""
    n, vocabulary = logits.shape
    for i in range(n):
        row, one, other = logits[i], keys[i, 0], keys[i, 1]
        peak, total = _peak(row), _F(0)
        for start in range(0, vocabulary, _SUM):
            part, bits, odds = row[start : start + _SUM], columns[start : start + _SUM], arrivals[start : start + _SUM]
            for c in range(len(odds)):
                odds[c] = exp(part[c] - peak)
            some = _F(0)
            for c in range(len(odds)):
                some += odds[c]
            total += some
            for c in range(len(odds)):
                x = _U(bits[c] + one)
                x = _U(_U(x ^ _U(x >> _U(16))) * _U(0x21F0AAAD)) ^ other
                x = _U(_U(x ^ _U(x >> _U(15))) * _U(0x735A2D97))
                uniform = (_F(_I(x >> _U(9))) + _F(0.5)) * _F(2.0**-23)
                odds[c] /= log(uniform)  # from here on a time, and negative: the least arrives first
        best, first = 0, arrivals[0]
        for c in range(1, vocabulary):
            if arrivals[c] < first:
                best, first = c, arrivals[c]
        tokens[i] = best
        totals[i] = np.log(total) + peak
