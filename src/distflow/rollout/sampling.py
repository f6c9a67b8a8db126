"""Samples tokens. The noise is a function of (seed, sample, position): a sample gets the same tokens anywhere."""

import math
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from itertools import chain
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.cpu import kernels_for
from distflow.cpu import logprobs as cpu_logprobs
from distflow.device.sizes import sizes_of
from distflow.errors import ConfigError
from distflow.rollout.engine import SamplingParams
from distflow.util.arrays import Ints
from distflow.util.copies import to_device
from distflow.util.seeds import mix


def sample(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    sample_ids: Ints,
    positions: Ints,
    seen: Sequence[Collection[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns tokens [n] for these positions of the responses, and their log-probs [n] under the softmax of logits
    [n, vocabulary] / temperature.

    The log-prob is that of the whole distribution, as a trainer computes it, also where top-p, top-k or min-p truncate
    it, or a repetition penalty changes it. The penalty needs `seen`: the distinct tokens of each sequence so far.
    """
    scaled = logits.float() if params.temperature in (0, 1) else logits.float() / params.temperature
    allowed = scaled
    if params.stop and (early := np.flatnonzero(positions < params.min_tokens)).size:
        allowed = scaled.clone()
        stop = to_device(torch.tensor(sorted(params.stop)), logits.device)
        allowed[to_device(torch.from_numpy(early), logits.device)[:, None], stop] = -math.inf
    if params.repetition_penalty != 1:
        allowed = _penalized(allowed, params.repetition_penalty, seen)
    if params.temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        candidates = _truncate(allowed, params) if params.truncated else allowed
        tokens, logprobs = gumbel_sample(candidates, noise_keys(seed, sample_ids, positions))
        if candidates is scaled:
            return tokens, logprobs
    return tokens, _logprobs(scaled, tokens, None)


def _logprobs(logits: Tensor, tokens: Tensor, total: Tensor | None) -> Tensor:
    """Returns the log-prob of one token of each row; `total`: the logsumexp, if it is known."""
    if kernels := kernels_for(logits):
        return cpu_logprobs.token_logprobs(kernels, logits, tokens)[0]
    return logits.gather(1, tokens[:, None])[:, 0] - (logits.logsumexp(-1) if total is None else total)


def noise_keys(seed: int, sample_ids: Ints, positions: Ints) -> Ints:
    """Returns 64 random bits for each (sample, position)."""
    word = mix(_seed_word(seed) + sample_ids.view(np.uint64))
    return mix(word + positions.view(np.uint64)).view(np.int64)


@lru_cache
def _seed_word(seed: int) -> NDArray[np.uint64]:
    return mix(np.array([seed & (2**64 - 1)], np.uint64))


def gumbel_sample(logits: Tensor, keys: Ints) -> tuple[Tensor, Tensor]:
    """Draws from the softmax of each row, with noise that only its key decides; returns tokens and their log-probs.

    The exponential form of the Gumbel-max trick: token i arrives after Exp(1) / p_i, and the first one is the draw.
    Rounding errors in the logits change the draw only where two of them nearly tie.
    """
    vocabulary = logits.shape[1]
    columns = _column_bits(vocabulary, logits.device)
    if kernels := kernels_for(logits):
        tokens = _in_kernel(kernels, logits, keys, columns)
        return tokens, _logprobs(logits, tokens, None)
    halves = to_device(torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()), logits.device)
    rows = max(1, sizes_of(logits.device.type).sampled_logits // vocabulary)
    draws = [_draw(logits[i : i + rows], halves[i : i + rows], columns) for i in range(0, len(logits), rows)]
    tokens, total = draws[0] if len(draws) == 1 else (torch.cat(parts) for parts in zip(*draws, strict=True))
    return tokens, _logprobs(logits, tokens, total)


def _draw(logits: Tensor, halves: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    odds = (logits - peak).exp_()
    total = odds.sum(-1).log_().add_(peak[:, 0])
    # 32 random bits for each logit. Integers here are signed: a logical shift takes a mask, a product wraps around.
    x = columns + halves[:, :1]
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD).bitwise_xor_(halves[:, 1:])
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    # 23 bits: of 24 and a half, float32 would round the highest up to 1, whose logarithm is 0.
    uniform = x.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1).float().add_(0.5).mul_(2.0**-23)
    return odds.div_(uniform.log_()).argmin(-1), total  # quotients are negative: the least arrives first


def _in_kernel(kernels: ModuleType, logits: Tensor, keys: Ints, columns: Tensor) -> Tensor:
    tokens = np.empty(len(logits), np.int64)
    bits = keys.view(np.uint32).reshape(-1, 2), columns.numpy().view(np.uint32)
    arrivals = np.empty(logits.shape[1], np.float32)
    kernels.gumbel_sample(logits.numpy(), *bits, arrivals, tokens)
    return torch.from_numpy(tokens)


@cache
def _column_bits(vocabulary: int, device: torch.device) -> Tensor:
    """32 random bits for each token of a vocabulary."""
    words = mix(np.arange(vocabulary, dtype=np.uint64)) >> np.uint64(32)
    return to_device(torch.from_numpy(words.astype(np.uint32).view(np.int32)), device)


def _penalized(logits: Tensor, penalty: float, seen: Sequence[Collection[int]] | None) -> Tensor:
    """Returns logits in which positive ones of tokens that were `seen` are divided by the penalty, and negative ones
    multiplied (arXiv 1909.05858)."""
    if seen is None:
        raise ConfigError(
            "rollout.repetition_penalty: this engine does not say which tokens a sequence has; set it to 1"
        )
    rows = np.repeat(np.arange(len(seen)), [len(tokens) for tokens in seen])
    tokens = np.fromiter(chain.from_iterable(seen), np.int64, len(rows))
    at = tuple(to_device(torch.from_numpy(x), logits.device) for x in (rows, tokens))
    values = logits[at]
    return logits.index_put(at, torch.where(values > 0, values / penalty, values * penalty))


def _truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Sets logits outside of top-k, then of min-p, then of top-p, to −∞. The likeliest token always stays."""
    k = min(params.top_k, logits.shape[-1])
    if k:
        logits = logits.masked_fill(logits < logits.topk(k).values[:, -1:], -math.inf)
    if params.min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # the mass of all likelier ones
        outside = before >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -math.inf)
    return logits
