"""The KV cache: decoding with it attends to what was written, in a kernel and without one."""

import resource
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow import cpu
from distflow.model.attention import AttentionParams, PackedAttention
from distflow.rollout.builtin import kv_cache
from distflow.rollout.builtin.kv_cache import KVCache, split_slots
from distflow.rollout.builtin.panel_cache import PanelCache
from rollout.plain_loop import expected, generate, generator, same
from tiny import ARCHITECTURES

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


def empty_cache(backend: str, dtype: torch.dtype) -> KVCache:
    return (PanelCache if backend == "kernels" and dtype == torch.float32 else KVCache)(20, PAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_prefill_and_decode_give_what_a_pass_over_the_sequence_gives(
    params: AttentionParams, heads: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    torch.manual_seed(2)
    prompts, responses = [5, 1, 3], 6
    shape = heads[0], heads[1], heads[1]
    rows = [[torch.randn(each, n + responses, DIM, dtype=dtype) for each in shape] for n in prompts]
    cache, outputs, tables = empty_cache(backend, dtype), list[Tensor](), TABLES[:3]

    def packed(lengths: list[int], starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[x[:, a : a + n] for x in row] for row, a, n in zip(rows, starts, lengths, strict=True)]
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return q, k, v

    prefill = cache.attention(np.zeros(3, np.int64), np.array(prompts), tables.tolist(), CPU)
    outputs = list(prefill(0, *packed(prompts, [0, 0, 0]), params).split(prompts))
    for step in range(responses):
        positions = [n + step for n in prompts]
        decode = cache.attention(np.array(positions), np.array(positions) + 1, tables, CPU)
        new = decode(0, *packed([1, 1, 1], positions), params)
        outputs = [torch.cat((before, one[None])) for before, one in zip(outputs, new, strict=True)]
    for (q, k, v), got in zip(rows, outputs, strict=True):
        want = PackedAttention([q.shape[1]])(0, q, k, v, params)
        close = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, want, atol=close, rtol=close)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_an_extension_gives_what_a_pass_over_the_sequence_gives(params: AttentionParams, backend: str) -> None:
    """Of several sequences at once, each with its own number of new tokens, twice in a row."""
    torch.manual_seed(3)
    cuts, tables = [[5, 1, 3], [7, 9, 4], [16, 10, 11]], TABLES[:3]
    rows = [[torch.randn(heads, n, DIM) for heads in (4, 2, 2)] for n in cuts[-1]]
    cache = empty_cache(backend, torch.float32)

    def packed(starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[x[:, a:b] for x in row] for row, a, b in zip(rows, starts, ends, strict=True)]
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return q, k, v

    prefill = cache.attention(np.zeros(3, np.int64), np.array(cuts[0]), tables.tolist(), CPU)
    outputs = list(prefill(0, *packed([0, 0, 0], cuts[0]), params).split(cuts[0]))
    for starts, ends in pairwise(cuts):
        extension = cache.attention(np.array(starts), np.array(ends), tables.tolist(), CPU)
        new = extension(0, *packed(starts, ends), params)
        lengths = [b - a for a, b in zip(starts, ends, strict=True)]
        outputs = [torch.cat(both) for both in zip(outputs, new.split(lengths), strict=True)]
    for (q, k, v), got in zip(rows, outputs, strict=True):
        want = PackedAttention([q.shape[1]])(0, q, k, v, params)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reading_the_cache_in_small_blocks_gives_the_same(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    monkeypatch.setattr(kv_cache, "_CALL", 0)
    monkeypatch.setattr(kv_cache, "_SMALLEST", 1)
    assert same(generate(generator(arch, 8)), expected(arch))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=200), st.sampled_from([0, 40, 512]))
@settings(deadline=None)
def test_blocks_cover_the_slots_and_read_no_more_than_one_would(lengths: list[int], call: int) -> None:
    with patch.object(kv_cache, "_CALL", call):
        cost, blocks = split_slots(np.array(lengths), 0, len(lengths))
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(len(lengths)))
    assert cost == sum((hi - lo) * max(lengths[lo:hi]) + call for lo, hi in blocks)
    assert cost <= len(lengths) * max(lengths) + call


@given(st.permutations(range(6)), st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_panels_of_sequences_are_copied_up_to_a_length(order: list[int], length: int) -> None:
    """Each has two pages of 20, anywhere in the cache."""
    cache, tables = PanelCache(6, 20), np.array(order).reshape(3, 2)
    q, k, v = (torch.randn(2, length, DIM) for _ in range(3))
    starts, ends = np.array([0]), np.array([length])
    want = cache.attention(starts, ends, tables[:1], CPU)(0, q, k, v, AttentionParams())
    cache.copy((tables[0].tolist(), tables[i].tolist(), length) for i in (1, 2))
    for table in tables[1:]:
        last = q[:, -1:], k[:, -1:], v[:, -1:]
        again = cache.attention(ends - 1, ends, table[None], CPU)(0, last[0], last[1], last[2], AttentionParams())
        assert torch.equal(again[0], want[-1])


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
