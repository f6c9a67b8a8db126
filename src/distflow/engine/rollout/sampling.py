"""Choosing tokens. The noise is a function of (seed, sample, position): a sample gets the same tokens anywhere."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints
from distflow.data.shuffle import mix
from distflow.engine.cpu import kernels_for

_BLOCK = 1 << 20  # elements worked on at once


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn, and when it ends."""

    max_tokens: int
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_tokens: int = 0  # no stop token before so many
    stop: frozenset[int] = frozenset()  # token ids; the response includes the one it ends with

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


def choose(logits: Tensor, how: Sampling, seed: int, samples: Ints, positions: Ints) -> tuple[Tensor, Tensor]:
    """Tokens [n], at these positions of the responses, and their log-probs [n] under the softmax of logits /
    temperature; `logits` [n, vocabulary].

    The log-prob is that of the whole distribution, as a trainer computes it, also where top-p or top-k cut it.
    """
    scaled = logits.float() if how.temperature in (0, 1) else logits.float() / how.temperature
    allowed = scaled
    if how.stop and (early := np.flatnonzero(positions < how.min_tokens)).size:
        allowed = scaled.clone()
        allowed[torch.from_numpy(early)[:, None], torch.tensor(sorted(how.stop))] = -math.inf
    if how.temperature == 0:
        tokens, total = allowed.argmax(-1), scaled.logsumexp(-1)
    else:
        entering = _truncate(allowed, how) if how.truncated else allowed
        tokens, total = race(entering, keys(seed, samples, positions))
        if entering is not scaled:
            total = scaled.logsumexp(-1)
    return tokens, scaled.gather(1, tokens[:, None])[:, 0] - total


def keys(seed: int, samples: Ints, positions: Ints) -> Ints:
    """A word of 64 random bits for each (sample, position)."""
    with np.errstate(over="ignore"):
        word = mix(mix(np.array([seed & (2**64 - 1)], np.uint64)) + samples.astype(np.uint64))
        return mix(word + positions.astype(np.uint64)).view(np.int64)


def race(logits: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    """A draw from the softmax of each row, which rounding changes only where two tie; and their logsumexp.

    Every token runs for a time that is exponential, at the speed of its odds; the first to arrive is the draw.
    """
    n, vocabulary = logits.shape
    column = _column(vocabulary, logits.device)
    if compiled := kernels_for(logits):
        tokens, totals = np.empty(n, np.int64), np.empty(n, np.float32)
        words = keys.view(np.uint32).reshape(n, 2), column.numpy().view(np.uint32)
        compiled.race(logits.numpy(), *words, tokens, totals)
        return torch.from_numpy(tokens), torch.from_numpy(totals)
    halves = torch.from_numpy(keys.view(np.int32).reshape(n, 2).copy()).to(logits.device)
    rows = max(1, _BLOCK // vocabulary)
    runs = [_race(logits[i : i + rows], halves[i : i + rows], column) for i in range(0, n, rows)]
    if len(runs) == 1:
        return runs[0]
    return torch.cat([tokens for tokens, _ in runs]), torch.cat([total for _, total in runs])


def _race(logits: Tensor, halves: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    odds = (logits - peak).exp_()
    total = odds.sum(-1).log_().add_(peak[:, 0])
    # A word of 32 random bits each. Integers here are signed: a logical shift takes a mask, a product wraps around.
    x = column + halves[:, :1]
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD).bitwise_xor_(halves[:, 1:])
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    # 23 bits: of 24 and a half, float32 would round the highest up to 1, whose logarithm is 0.
    uniform = x.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1).float().add_(0.5).mul_(2.0**-23)
    return odds.div_(uniform.log_()).argmin(-1), total  # quotients are negative: the least is the fastest


_columns: dict[tuple[int, torch.device], Tensor] = {}


def _column(vocabulary: int, device: torch.device) -> Tensor:
    key = vocabulary, device
    if key not in _columns:
        words = mix(np.arange(vocabulary, dtype=np.uint64)) >> np.uint64(32)
        _columns[key] = torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device)
    return _columns[key]


def _truncate(logits: Tensor, how: Sampling) -> Tensor:
    """Those outside of top-k, then of top-p, at −∞. The likeliest token always stays."""
    k = min(how.top_k, logits.shape[-1])
    if k:
        logits = logits.masked_fill(logits < logits.topk(k).values[:, -1:], -math.inf)
    if how.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # the mass of all likelier ones
        outside = before >= how.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -math.inf)
    return logits
