"""The KV cache of a device: what its pages hold is what a pass over whole sequences computes."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from accelerator import flash
from distflow.model.attention import AttentionParams, PackedAttention
from distflow.rollout.builtin.device_cache import PAGE, DeviceCache, PagedAttention
from rollout.plain_loop import expected, generate, generator, same

CPU = torch.device("cpu")
TABLES = np.random.default_rng(0).permutation(8)[:6].reshape(3, 2)  # the pages of three sequences


@pytest.mark.parametrize("params", [AttentionParams(), AttentionParams(scale=0.3, window=4)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_prompts_extensions_and_single_tokens_give_what_a_pass_gives(
    params: AttentionParams, heads: tuple[int, int]
) -> None:
    torch.manual_seed(2)
    cuts = [[0, 0, 0], [5, 1, 254], [9, 250, 255], [10, 251, 256], [11, 252, 257], [300, 258, 258]]
    shape = heads[0] + 2 * heads[1]
    rows = [torch.randn(n, shape, 8) for n in cuts[-1]]
    cache, outputs = DeviceCache(8, PAGE), [[torch.empty(0, heads[0], 8)] for _ in rows]
    with flash.on_cpu():
        for starts, ends in pairwise(map(np.array, cuts)):
            qkv = torch.cat([row[a:b] for row, a, b in zip(rows, starts, ends, strict=True)])
            q, k, v = (x.transpose(0, 1) for x in qkv.split([heads[0], heads[1], heads[1]], 1))
            if ends[0] == 9:
                k, v = k.clone(), v.clone()  # in memory apart from each other
            out = PagedAttention(cache, starts, ends, TABLES, CPU)(0, q, k, v, params)
            for before, new in zip(outputs, out.split((ends - starts).tolist()), strict=True):
                before.append(new)
    for row, got in zip(rows, outputs, strict=True):
        q, k, v = (x.transpose(0, 1) for x in row.split([heads[0], heads[1], heads[1]], 1))
        torch.testing.assert_close(torch.cat(got), PackedAttention([len(row)])(0, q, k, v, params))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_the_engine_generates_what_a_plain_loop_generates(arch: str) -> None:
    with flash.on_cpu():
        assert same(generate(engine := generator(arch, 8)), expected(arch))
    assert isinstance(engine.caches[0], DeviceCache) == (arch != "gemma2")  # whose scores have a soft cap
