"""Causal attention in float32: under training, of prompts and of tokens that are decoded.

Keys and values lie in pages, as panels: `keys` [pages, groups, page / PANEL, dim, PANEL], `values` [pages, groups,
dim / PANEL, page, PANEL]; a group is the heads that share keys. What a token gets depends on nothing but what it sees:
sums have their parts at multiples of SUM from the beginning of its sequence, and what it does not see adds zeros.
"""

import numpy as np

from distflow.cpu.kernels.compiled import SUMS, compiled
from distflow.cpu.kernels.layers import exp, largest, tanh
from distflow.cpu.kernels.products import PANEL, SUM, aligned, copy, multiply_block, to_panel

_F = np.float32
ROWS = 96  # of queries that go together


@compiled(SUMS, inline=True)
def _sum(row):
    """The sum of SUM numbers."""
    total = _F(0)
    for t in range(SUM):
        total += row[t]
    return total


@compiled(set(), inline=True)
def _multiple(n, of):
    """Rounds up."""
    return (n + of - 1) // of * of


@compiled({"contract"}, inline=True)
def _weigh(row, low, high, first, last, cap):
    """Turns scores from `low` to `high` into exp(score − peak), the others from `first` to `last`, both multiples of
    SUM, into 0. Returns the peak and the sum."""
    seen = row[low:high]  # loops from 0 on are vectorised: no index can be negative
    if cap > _F(0):
        for t in range(len(seen)):
            seen[t] = cap * tanh(seen[t] / cap)
    peak = largest(seen)
    row[first:low] = _F(0)
    for t in range(len(seen)):
        seen[t] = exp(seen[t] - peak)
    row[high:last] = _F(0)
    total = _F(0)
    for t in range(first, last, SUM):
        total += _sum(row[t : t + SUM])
    return peak, total


@compiled(set())
def write_pages(k, v, keys, values, pages, places):
    """Writes k, v [n, groups, dim] to these places of these pages."""
    n, groups, dim = k.shape
    for g in range(groups):
        for i in range(n):
            page, panel, lane = pages[i], places[i] // PANEL, places[i] % PANEL
            for d in range(dim):
                keys[page, g, panel, d, lane] = k[i, g, d]
            for d in range(dim):
                values[page, g, d // PANEL, places[i], d % PANEL] = v[i, g, d]


@compiled(set())
def attend(q, keys, values, tables, blocks, scale, window, cap, out, logsums):
    """Attention of blocks of q [n, heads, dim]: each has a row of `tables`, which are pages, its first row of q and the
    end of its rows, and the place of the first one. `logsums` [n, heads] or empty: of exp(scores), for the gradient."""
    _, heads, dim = q.shape
    groups, size = keys.shape[1], values.shape[3]
    each = heads // groups
    longest, most = 0, 0
    for b in range(len(blocks)):
        rows = blocks[b, 2] - blocks[b, 1]
        longest, most = max(longest, blocks[b, 3] + rows), max(most, rows * each)
    query, some = np.empty((most, dim), _F), np.empty((most, values.shape[2] * PANEL), _F)
    scores, totals = np.empty((most, _multiple(longest, SUM) + PANEL), _F), np.empty(most, _F)
    for b in range(len(blocks)):
        table, low, high, place = blocks[b]
        count, end, start = (high - low) * each, place + high - low, max(0, place + 1 - window)
        for g in range(groups):
            for i in range(low, high):
                for e in range(each):
                    for d in range(dim):
                        query[(i - low) * each + e, d] = q[i, g * each + e, d] * scale
            for p in range(start // size, (end - 1) // size + 1):
                base, left = p * size, max(0, start - p * size) // PANEL
                right = _multiple(min(end - base, size), PANEL) // PANEL
                to = scores[:count, base + left * PANEL : base + right * PANEL]
                multiply_block(query[:count], keys[tables[table, p], g, left:right], 0, to, True)
            for r in range(count):
                seen = place + r // each + 1
                bounds = start // SUM * SUM, _multiple(end, SUM)
                peak, total = _weigh(scores[r], max(0, seen - window), seen, bounds[0], bounds[1], cap)
                totals[r] = _F(1) / total
                if len(logsums):
                    logsums[low + r // each, g * each + r % each] = np.log(total) + peak
            for p in range(start // size, (end - 1) // size + 1):
                base, left = p * size, max(0, start - p * size)
                weights = scores[:count, base + left : min(end, base + size)]
                multiply_block(weights, values[tables[table, p], g], left, some[:count], p == start // size)
            for i in range(low, high):
                for e in range(each):
                    r = (i - low) * each + e
                    for d in range(dim):
                        out[i, g * each + e, d] = some[r, d] * totals[r]


@compiled(SUMS, inline=True)
def _dot(a, b):
    total = _F(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@compiled({"contract"}, inline=True)
def _slopes(scores, slopes, logsum, along, cap):
    """Turns scores into weights, and the gradients of weights into those of scores."""
    if cap > _F(0):
        for t in range(len(scores)):
            soft = tanh(scores[t] / cap)
            scores[t] = exp(cap * soft - logsum)
            slopes[t] = scores[t] * (slopes[t] - along) * (_F(1) - soft * soft)
    else:
        for t in range(len(scores)):
            scores[t] = exp(scores[t] - logsum)
            slopes[t] = scores[t] * (slopes[t] - along)


@compiled(set(), inline=True)
def _panels(count, dim):
    return aligned(count * dim * PANEL).reshape(count, dim, PANEL)


@compiled(set())
def attend_backward(d, q, k, v, out, logsums, jobs, spans, scale, window, cap, dq, dk, dv):
    """Gradients of attention for some jobs: a sequence × group each. `spans` of a sequence: its rows of q, and its rows
    of k and v, the last of which are those of q."""
    _, heads, dim = q.shape
    groups = k.shape[1]
    each = heads // groups
    block, wide = max(1, ROWS // each), _multiple(dim, PANEL)
    rows, longest = block * each, 0
    for s in range(len(spans)):
        longest = max(longest, _multiple(spans[s, 3] - spans[s, 2], PANEL))
    query, grad = np.empty((rows, dim), _F), np.empty((rows, dim), _F)
    query_t, grad_t, some = np.empty((dim, rows), _F), np.empty((dim, rows), _F), np.empty((rows, wide), _F)
    scores, slopes = np.empty((rows, longest + PANEL), _F), np.empty((rows, longest + PANEL), _F)
    count = longest // PANEL
    weights_p, slopes_p = _panels(count, rows), _panels(count, rows)
    keys, values, keys_d = _panels(count, dim), _panels(count, dim), _panels(wide // PANEL, longest)
    dk_t, dv_t = np.empty((dim, longest), _F), np.empty((dim, longest), _F)
    for job in jobs:
        g, (row, row_end, key, key_end) = job % groups, spans[job // groups]
        length, before = key_end - key, (key_end - key) - (row_end - row)
        for t in range(0, length, PANEL):
            last = min(key + t + PANEL, key_end)
            to_panel(k[key + t : last, g].T, keys[t // PANEL])
            to_panel(v[key + t : last, g].T, values[t // PANEL])
        for c in range(0, dim, PANEL):
            to_panel(k[key:key_end, g, c : c + PANEL], keys_d[c // PANEL, :length])
        dk_t[:, : _multiple(length, PANEL)] = _F(0)
        dv_t[:, : _multiple(length, PANEL)] = _F(0)
        for low in range(row, row_end, block):
            high = min(low + block, row_end)
            count, place = (high - low) * each, before + low - row
            end, first = place + high - low, max(0, place + 1 - window) // PANEL * PANEL
            last = _multiple(end, PANEL)
            panels = slice(first // PANEL, last // PANEL)
            for i in range(low, high):
                for e in range(each):
                    r, h = (i - low) * each + e, g * each + e
                    for c in range(dim):
                        query[r, c] = query_t[c, r] = q[i, h, c] * scale
                        grad[r, c] = grad_t[c, r] = d[i, h, c]
            multiply_block(query[:count], keys[panels], 0, scores[:count, first:last], True)
            multiply_block(grad[:count], values[panels], 0, slopes[:count, first:last], True)
            for r in range(count):
                i, h, seen = low + r // each, g * each + r % each, place + r // each + 1
                unseen = max(0, seen - window)
                along, weights, slope = _dot(grad[r], out[i, h]), scores[r, unseen:seen], slopes[r, unseen:seen]
                _slopes(weights, slope, logsums[i, h], along, cap)
                scores[r, first:unseen] = _F(0)
                slopes[r, first:unseen] = _F(0)
                scores[r, seen:last] = _F(0)
                slopes[r, seen:last] = _F(0)
            for t in range(first, last, PANEL):
                copy(scores[:count, t : t + PANEL], weights_p[t // PANEL])
                copy(slopes[:count, t : t + PANEL], slopes_p[t // PANEL])
            for t in range(first, end, SUM):
                multiply_block(slopes[:count, t : min(t + SUM, end)], keys_d, t, some[:count], t == first)
            multiply_block(query_t[:, :count], slopes_p[panels], 0, dk_t[:, first:last], False)
            multiply_block(grad_t[:, :count], weights_p[panels], 0, dv_t[:, first:last], False)
            for i in range(low, high):
                for e in range(each):
                    for c in range(dim):
                        dq[i, g * each + e, c] = some[(i - low) * each + e, c] * scale
        copy(dk_t[:, :length].T, dk[key:key_end, g])
        copy(dv_t[:, :length].T, dv[key:key_end, g])
