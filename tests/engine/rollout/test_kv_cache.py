"""The KV cache: decoding with it attends to what was written, in the version for any device and in that for CPUs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.engine.cpu.decode_attention import CpuDecode
from distflow.engine.model.attention import AttentionParams, PackedAttention
from distflow.engine.rollout.kv_cache import Decode, KVCache, Prefill

LONGEST, DIM, CPU = 16, 8, torch.device("cpu")
PARAMS = [
    AttentionParams(),
    AttentionParams(scale=0.3),
    AttentionParams(window=1),
    AttentionParams(window=4),
    AttentionParams(window=100),
    AttentionParams(softcap=1.5),
    AttentionParams(scale=0.3, window=4, softcap=1.5),
]


def filled_cache(slots: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> KVCache:
    cache, noise = KVCache(slots, LONGEST), torch.Generator().manual_seed(1)
    for layer in range(2):
        contents = torch.randn(2, slots, kv_heads, LONGEST, DIM, generator=noise)
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
    caches = [filled_cache(7, keys, dtype) for _ in range(2)]
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for step in range(3):
        attentions = Decode(caches[0], positions + step, CPU), CpuDecode(caches[1], positions + step, CPU)
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
    cache, outputs = KVCache(4, LONGEST), list[Tensor]()

    def packed(lengths: list[int], starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        parts = [[x[:, a : a + n] for x in row] for row, a, n in zip(rows, starts, lengths, strict=True)]
        q, k, v = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return q, k, v

    prefill = Prefill(cache, prompts, [0, 1, 2])
    outputs = list(prefill(0, *packed(prompts, [0, 0, 0]), params).split(prompts))
    for step in range(responses):
        positions = [n + step for n in prompts]
        new = kind(cache, torch.tensor(positions), CPU)(0, *packed([1, 1, 1], positions), params)
        outputs = [torch.cat((before, one[None])) for before, one in zip(outputs, new, strict=True)]
    for (q, k, v), got in zip(rows, outputs, strict=True):
        want = PackedAttention([q.shape[1]])(0, q, k, v, params)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(1, LONGEST))
@settings(deadline=None, max_examples=30)
def test_slots_are_copied_up_to_a_length(order: list[int], count: int, length: int) -> None:
    cache = filled_cache(6, 2)
    before = {layer: both.clone() for layer, both in cache.layers.items()}
    sources, targets = torch.tensor(order[:count], dtype=torch.int64), torch.tensor(order[6 - count :])
    cache.copy(sources, targets.to(torch.int64), length)
    for layer, both in cache.layers.items():
        want = before[layer].clone()
        for source, target in zip(order[:count], order[6 - count :], strict=True):
            want[:, target, :, :length] = before[layer][:, source, :, :length]
        assert torch.equal(both, want)
