"""What a model does between its products, and attention, log-probs and sampling, in float32."""

import numpy as np

from distflow.cpu.kernels.compiled import SUMS, compiled
from distflow.cpu.kernels.products import PANEL, SUM, linear

_F, _U, _I = np.float32, np.uint32, np.int32


@compiled({"contract"}, inline=True)
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


@compiled({"contract"}, inline=True)
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


@compiled({"contract"}, inline=True)
def tanh(x):
    """Computes tanh x to the last bits: a continued fraction near 0, by e^2x elsewhere."""
    far = _F(1) - _F(2) / (exp(_F(2) * abs(x)) + _F(1))
    z = x * x
    near = x * ((z + _F(105)) * z + _F(945)) / ((_F(15) * z + _F(420)) * z + _F(945))
    return near if abs(x) < _F(0.625) else (far if x > _F(0) else -far)


@compiled(SUMS, inline=True)
def _squares(row):
    """The sum of PANEL squares: of a fixed number, so that every kernel that this is a part of orders them alike."""
    total = _F(0)
    for d in range(PANEL):
        total += row[d] * row[d]
    return total


@compiled(set(), inline=True)
def norm(x, weight, epsilon, out):
    """RMSNorm of the rows of [n, dim]."""
    n, dim = x.shape
    whole = dim - dim % PANEL
    for i in range(n):
        row, to = x[i], out[i]
        total = _F(0)
        for d in range(0, whole, PANEL):
            total += _squares(row[d : d + PANEL])
        for d in range(whole, dim):
            total += row[d] * row[d]
        factor = _F(1) / np.sqrt(total / _F(dim) + epsilon)
        for d in range(dim):
            to[d] = row[d] * factor * weight[d]


@compiled(set(), inline=True)  # as separate operations compute it, of which none is fused
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


@compiled(SUMS)
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


@compiled(set(), inline=True)
def _gate_row(gate, up, out):
    for d in range(len(out)):
        out[d] = gate[d] / (_F(1) + exp(-gate[d])) * up[d]


@compiled(set())
def gate(gate, up, out):
    """silu(gate) × up"""
    for i in range(len(out)):
        _gate_row(gate[i], up[i], out[i])


@compiled(SUMS)
def gate_backward(d, gate, up, d_gate, d_up):
    n, dim = d.shape
    for i in range(n):
        grad, a, b, to_a, to_b = d[i], gate[i], up[i], d_gate[i], d_up[i]
        for j in range(dim):
            share = _F(1) / (_F(1) + exp(-a[j]))
            to_a[j] = grad[j] * b[j] * share * (_F(1) + a[j] * (_F(1) - share))
            to_b[j] = grad[j] * a[j] * share


@compiled(set(), inline=True)
def _norm_heads(x, first, last, weight, epsilon):
    for i in range(len(x)):
        norm(x[i, first:last], weight, epsilon, x[i, first:last])


@compiled(set())
def before_attention(x, weight, epsilon, weights, bias, norms, queries, keys, positions, cos, sin, normed, qkv):
    """The part of a layer before attention: queries, keys and values of x [n, hidden] into qkv [n, heads, dim]."""
    norm(x, weight, epsilon, normed)
    linear(normed, weights, bias, qkv.reshape(len(x), -1))
    if len(norms[0]):
        _norm_heads(qkv, 0, queries, norms[0], epsilon)
        _norm_heads(qkv, queries, queries + keys, norms[1], epsilon)
    _rotate(qkv, queries + keys, positions, cos, sin)


@compiled(set())
def after_attention(x, y, out, out_bias, weight, epsilon, gate_up, gate_up_bias, down, down_bias, normed, both, gated):
    """The part of a layer after attention, whose output is y; overwrites x."""
    linear(y, out, out_bias, normed)
    x += normed
    norm(x, weight, epsilon, normed)
    linear(normed, gate_up, gate_up_bias, both)
    inner = gated.shape[1]
    for i in range(len(both)):
        _gate_row(both[i, :inner], both[i, inner:], gated[i])
    linear(gated, down, down_bias, normed)
    x += normed


@compiled(set(), inline=True)
def _in_order(bits):
    """Turns the bits of a number into a whole one that is larger for a larger number, and back."""
    return _I(bits ^ _I(_I(bits >> _I(31)) & _I(0x7FFFFFFF)))


@compiled(set(), inline=True)
def largest(row):
    """Returns the largest number of a row: as whole numbers, since NaN keeps those from being compared in parallel."""
    peak = _in_order(_F(-np.inf).view(_I))
    for c in range(len(row)):
        x = _in_order(_F(row[c]).view(_I))
        peak = x if x > peak else peak
    return _I(_in_order(peak)).view(_F)


@compiled(SUMS, inline=True)
def _softmax_sums(row):
    """Returns the maximum m, Σ exp(x − m), and Σ exp(x − m) (x − m)."""
    peak, total, weighted = largest(row), _F(0), _F(0)
    for start in range(0, len(row), SUM):
        some, far = _F(0), _F(0)
        for c in range(start, min(start + SUM, len(row))):
            odds = exp(row[c] - peak)
            some += odds
            far += odds * (row[c] - peak)
        total += some
        weighted += far
    return peak, total, weighted


@compiled(SUMS)
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


@compiled(SUMS)
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


@compiled(SUMS)
def gumbel_sample(logits, keys, columns, arrivals, tokens):
    """`rollout.sampling.gumbel_sample`: the token of each row that arrives first. `arrivals` [vocabulary] is scratch
    memory."""
    n, vocabulary = logits.shape
    for i in range(n):
        row, one, other = logits[i], keys[i, 0], keys[i, 1]
        peak = largest(row)
        for c in range(vocabulary):
            x = _U(columns[c] + one)
            x = _U(_U(x ^ _U(x >> _U(16))) * _U(0x21F0AAAD)) ^ other
            x = _U(_U(x ^ _U(x >> _U(15))) * _U(0x735A2D97))
            uniform = (_F(_I(x >> _U(9))) + _F(0.5)) * _F(2.0**-23)
            arrivals[c] = exp(row[c] - peak) / log(uniform)  # a negative time: the least arrives first
        best, first = 0, arrivals[0]
        for c in range(1, vocabulary):
            if arrivals[c] < first:
                best, first = c, arrivals[c]
        tokens[i] = best
