"""Choosing tokens. The noise is a function of (seed, sample, position): a sample gets the same tokens anywhere."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints
from distflow.data.order import mix

_BLOCK = 1 << 17  # elements worked on at once: they stay in the cache of a core


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
        tokens = allowed.argmax(-1)
    else:
        tokens = race(_truncate(allowed, how) if how.truncated else allowed, keys(seed, samples, positions))
    picked = scaled.gather(1, tokens[:, None])[:, 0]
    return tokens, picked - scaled.logsumexp(-1)


def keys(seed: int, samples: Ints, positions: Ints) -> Ints:
    """A word of 64 random bits for each (sample, position)."""
    with np.errstate(over="ignore"):
        word = mix(mix(np.array([seed & (2**64 - 1)], np.uint64)) + samples.astype(np.uint64))
        return mix(word + positions.astype(np.uint64)).view(np.int64)


def race(logits: Tensor, keys: Ints) -> Tensor:
    """argmax of logits + Gumbel noise: a draw from their softmax, which rounding changes only where two tie."""
    n, vocabulary = logits.shape
    halves = torch.from_numpy(keys.view(np.int32).reshape(n, 2).copy()).to(logits.device)
    rows = max(1, _BLOCK // vocabulary)
    column = _column(vocabulary, logits.device)
    return torch.cat([_race(logits[i : i + rows], halves[i : i + rows], column) for i in range(0, n, rows)])


def _race(logits: Tensor, halves: Tensor, column: Tensor) -> Tensor:
    x = column + halves[:, :1]  # [n, vocabulary], a word of 32 bits each
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 0x2C1B3C6D), (12, 0x297A2D39)):
        # A logical shift, as integers here are signed; then a product that wraps around.
        x = x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
        if shift == 13:
            x ^= halves[:, 1:]
    x = x.bitwise_xor_(x.bitwise_right_shift(15).bitwise_and_((1 << 17) - 1))
    # 23 bits: of 24 and a half, float32 would round the highest up to 1, whose noise is infinite.
    uniform = x.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_().add_(logits).argmax(-1)


_columns: dict[tuple[int, torch.device], Tensor] = {}


def _column(vocabulary: int, device: torch.device) -> Tensor:
    key = vocabulary, device
    if key not in _columns:
        spread = np.arange(vocabulary, dtype=np.uint32) * np.uint32(0x9E3779B1)
        _columns[key] = torch.from_numpy(spread.view(np.int32)).to(device)
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
