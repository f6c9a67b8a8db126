"""The KV cache: decoding with it attends to what was written, in the version for any device and in that for CPUs."""

import resource
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.cpu.decode_attention import CpuDecode
from distflow.model.attention import AttentionParams, PackedAttention
from distflow.rollout.builtin.kv_cache import Decode, Extension, KVCache, Prefill

PAGE, DIM, CPU = 4, 8, torch.device("cpu")
TABLES = np.random.default_rng(0).permutation(20).reshape(5, 4)  # the pages of five sequences of up to 16 tokens
PARAMS = [
    AttentionParams(),
    AttentionParams(scale=0.3),
    AttentionParams(window=1),
    AttentionParams(window=4),
    AttentionParams(window=100),
    AttentionParams(softcap=1.5),
    AttentionParams(scale=0.3, window=4, softcap=1.5),
]


def filled_cache(pages: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> KVCache:
    cache, noise = KVCache(pages, PAGE), torch.Generator().manual_seed(1)
    for layer in range(2):
        contents = torch.randn(2, pages, kv_heads, PAGE, DIM, generator=noise)
        cache.layer(layer, torch.zeros(kv_heads, 1, DIM, dtype=dtype)).copy_(contents)
    return cache


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("backend")
def test_decoding_gives_the_same_on_any_device(
    params: AttentionParams, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """In several layers and steps, on what is in the cache already."""
    queries, keys = heads
    torch.manual_seed(0)
    positions = torch.tensor([0, 5, 11, 3, 8])
    caches = [filled_cache(20, keys, dtype) for _ in range(2)]
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for step in range(3):
        at = positions + step
        attentions = Decode(caches[0], at, TABLES, CPU), CpuDecode(caches[1], at, TABLES, CPU)
        for layer in range(2):
            q, k, v = (torch.randn(n, 5, DIM).to(dtype) for n in (queries, keys, keys))
            got, want = (attention(layer, q, k, v, params) for attention in attentions)
            assert got.shape == (5, queries, DIM)
            torch.testing.assert_close(got, want, atol=close, rtol=close)
            assert torch.equal(*(c.layers[layer] for c in caches))


@pytest.mark.parametrize("kind", [Decode, CpuDecode])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.usefixtures("backend")
def test_prefill_and_decode_give_what_a_pass_over_the_sequence_gives(
    kind: type[Decode] | type[CpuDecode], params: AttentionParams
) -> None:
    torch.manual_seed(2)
    prompts, responses = [5, 1, 3], 6
    rows = [[torch.randn(heads, n + responses, DIM) for heads in (4, 2, 2)] for n in prompts]
    cache, outputs, tables = KVCache(20, PAGE), list[Tensor](), TABLES[:3]

    def packed(lengths: list[int], starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[x[:, a : a + n] for x in row] for row, a, n in zip(rows, starts, lengths, strict=True)]
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return q, k, v

    prefill = Prefill(cache, prompts, tables.tolist())
    outputs = list(prefill(0, *packed(prompts, [0, 0, 0]), params).split(prompts))
    for step in range(responses):
        positions = [n + step for n in prompts]
        new = kind(cache, torch.tensor(positions), tables, CPU)(0, *packed([1, 1, 1], positions), params)
        outputs = [torch.cat((before, one[None])) for before, one in zip(outputs, new, strict=True)]
    for (q, k, v), got in zip(rows, outputs, strict=True):
        want = PackedAttention([q.shape[1]])(0, q, k, v, params)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.usefixtures("backend")
def test_an_extension_gives_what_a_pass_over_the_sequence_gives(params: AttentionParams) -> None:
    """Of several sequences at once, each with its own number of new tokens, twice in a row."""
    torch.manual_seed(3)
    cuts, tables = [[5, 1, 3], [7, 9, 4], [16, 10, 11]], TABLES[:3]
    rows = [[torch.randn(heads, n, DIM) for heads in (4, 2, 2)] for n in cuts[-1]]
    cache = KVCache(20, PAGE)

    def packed(starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[x[:, a:b] for x in row] for row, a, b in zip(rows, starts, ends, strict=True)]
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return q, k, v

    outputs = list(Prefill(cache, cuts[0], tables.tolist())(0, *packed([0, 0, 0], cuts[0]), params).split(cuts[0]))
    for starts, ends in pairwise(cuts):
        new = Extension(cache, starts, ends, tables.tolist(), CPU)(0, *packed(starts, ends), params)
        lengths = [b - a for a, b in zip(starts, ends, strict=True)]
        outputs = [torch.cat(both) for both in zip(outputs, new.split(lengths), strict=True)]
    for (q, k, v), got in zip(rows, outputs, strict=True):
        want = PackedAttention([q.shape[1]])(0, q, k, v, params)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@given(st.permutations(range(12)), st.integers(0, 3), st.integers(1, 2 * PAGE))
@settings(deadline=None, max_examples=30)
def test_sequences_are_copied_up_to_a_length(order: list[int], count: int, length: int) -> None:
    """Each has two pages, anywhere in the cache."""
    cache = filled_cache(12, 2)
    before = {layer: both.clone() for layer, both in cache.layers.items()}
    pairs = [(order[4 * i : 4 * i + 2], order[4 * i + 2 : 4 * i + 4]) for i in range(count)]
    cache.copy((source, target, length) for source, target in pairs)
    for layer, both in cache.layers.items():
        want = before[layer].clone()
        for source, target in pairs:
            for t in range(length):
                want[:, target[t // PAGE], :, t % PAGE] = before[layer][:, source[t // PAGE], :, t % PAGE]
        assert torch.equal(both, want)


def test_memory_is_taken_as_pages_are_written() -> None:
    """A cache of 1 GiB, of which one page in a thousand is used."""
    cache = KVCache(4096, 256)
    before = resident_bytes()
    keys, values = cache.layer(0, torch.zeros(2, 1, 64))
    assert keys.nbytes + values.nbytes == 1 << 30
    keys[:4] = 1.0
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
