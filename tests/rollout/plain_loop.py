"""Requests of different lengths, and what a plain loop without a cache generates for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.model.attention import Attention
from distflow.model.source import kv_bytes
from distflow.rollout.builtin import generator as generator_module
from distflow.rollout.builtin.continuous_batch import Agree
from distflow.rollout.builtin.forward import Forward, forward_for
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.builtin.kv_cache import Prefill
from distflow.rollout.builtin.panel_cache import PanelAttention
from distflow.rollout.engine import Completion, Request, SamplingParams
from distflow.rollout.sampling import sample
from tiny import VOCABULARY, pair

SEED = 11
STOP = frozenset({2, 3, 4, 5, 6, 7})
PARAMS = SamplingParams(max_tokens=9, temperature=1.3, stop=STOP)

_rng = np.random.default_rng(0)
PROMPTS = [tuple(_rng.integers(0, VOCABULARY, n).tolist()) for n in (3, 12, 1, 5, 5, 21, 2, 5)]
PROMPT_OF = [1, 0, 5, 1, 2, 3, 1, 4, 6, 7, 5, 3, 1, 0]
IDS = [100 + 3 * i for i in range(len(PROMPT_OF))]
EVERYBODY = range(len(IDS))

Response = tuple[list[int], list[float], bool]  # tokens, log-probs, finished


def generator(
    arch: str,
    max_sequences: int = 64,
    cache_tokens: int = 10_000,
    agree: Agree = lambda tokens: tokens,
    max_batches: int = 1,
) -> Generator:
    return generator_for(pair(arch).ours, max_sequences, cache_tokens, agree, max_batches)


def generator_for(
    model: PreTrainedModel,
    max_sequences: int = 64,
    cache_tokens: int = 10_000,
    agree: Agree = lambda tokens: tokens,
    max_batches: int = 1,
) -> Generator:
    per_token = kv_bytes(model.config, torch.float32, 1)
    limits = CacheLimits(per_token, cache_tokens * per_token, max_sequences)
    return Generator(model, limits, torch.device("cpu"), agree, max_batches)


def requests_for(
    samples: Sequence[int] = EVERYBODY, params: SamplingParams = PARAMS, seed: int = SEED
) -> list[Request]:
    return [Request(IDS[i], PROMPTS[PROMPT_OF[i]], params, seed) for i in samples]


def complete(generator: Generator, requests: Sequence[Request]) -> list[Completion]:
    """Returns a completion for each request, in their order."""
    for request in requests:
        generator.add_request(request)
    return drain(generator, requests)


def drain(
    generator: Generator, requests: Sequence[Request], completions: Sequence[Completion] = ()
) -> list[Completion]:
    """Steps until nothing is left; each request is completed exactly once, `completions` included."""
    by_id = {c.sample_id: c for c in completions}
    while generator.has_unfinished:
        finished = generator.step()
        assert finished
        for completion in finished:
            assert completion.sample_id not in by_id
            by_id[completion.sample_id] = completion
    assert sorted(by_id) == sorted(r.sample_id for r in requests)
    return [by_id[r.sample_id] for r in requests]


def as_response(completion: Completion) -> Response:
    assert completion.tokens.dtype == np.int64
    assert completion.logprobs.dtype == np.float32
    return completion.tokens.tolist(), completion.logprobs.tolist(), completion.finished


def generate(
    generator: Generator,
    samples: Sequence[int] = EVERYBODY,
    params: SamplingParams = PARAMS,
    seed: int = SEED,
) -> list[Response]:
    return [as_response(c) for c in complete(generator, requests_for(samples, params, seed))]


@cache
def plain_loop(arch: str, request: Request) -> Response:
    """Generates token after token, each from a pass over all tokens so far."""
    tokens: list[int] = []
    logprobs: list[float] = []
    params, sample_id = request.params, np.array([request.sample_id])
    while request.position + len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop):
        logits = pair(arch).alone([*request.prompt, *tokens])[-1:]
        position = np.array([request.position + len(tokens)])
        token, logprob = sample(logits, params, request.seed, sample_id, position, [{*request.prompt, *tokens}])
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens, logprobs, tokens[-1] in params.stop


def expected(
    arch: str, samples: Sequence[int] = EVERYBODY, params: SamplingParams = PARAMS, seed: int = SEED
) -> list[Response]:
    return [plain_loop(arch, r) for r in requests_for(samples, params, seed)]


def same(got: Sequence[Response], want: Sequence[Response]) -> bool:
    return len(got) == len(want) and all(
        a[0] == b[0] and a[1] == pytest.approx(b[1], abs=1e-4) and a[2] == b[2] for a, b in zip(got, want, strict=True)
    )


def _kind(attention: Attention, keep: Tensor | None) -> str:
    if keep is None:  # the logits of all tokens are wanted
        return "Decode"
    whole = not attention.starts.any() if isinstance(attention, PanelAttention) else isinstance(attention, Prefill)
    return "Prefill" if whole else "Extension"


@contextmanager
def passes() -> Iterator[dict[str, list[int]]]:
    """Records how many tokens each pass through the model computes."""
    tokens_of: dict[str, list[int]] = {"Prefill": [], "Extension": [], "Decode": []}

    def recording(model: PreTrainedModel) -> Forward:
        forward = forward_for(model)

        class Recording:
            packed_weights = staticmethod(forward.packed_weights)

            def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention, keep: Tensor | None) -> Tensor:
                tokens_of[_kind(attention, keep)].append(len(tokens))
                return forward(tokens, positions, attention, keep)

        return Recording()

    with patch.object(generator_module, "forward_for", recording):
        yield tokens_of
