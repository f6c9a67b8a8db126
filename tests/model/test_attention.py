"""Attention over packed sequences gives what each sequence alone would: values, gradients, and whole models."""

from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from accelerator import flash
from distflow.model.attention import AttentionParams, PackedAttention, SharedPrompts
from tiny import ARCHITECTURES, WINDOW, Pair, pair

DIM = 6
ROWS = [list(range(3, 3 + n)) for n in (14, 9, 9, 9, 1, WINDOW, WINDOW + 1, 2, 1, 1)]
PARAMS = st.builds(
    AttentionParams,
    scale=st.sampled_from([None, 0.3, 2.0]),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 1.5]),
)


def by_hand(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """One sequence, one query at a time: [heads, tokens, dim] → [tokens, heads, dim]."""
    heads, tokens, dim = q.shape
    shared = heads // len(k)
    out = []
    for t in range(tokens):
        first = 0 if params.window is None else max(0, t - params.window + 1)
        for h in range(heads):
            keys, values = k[h // shared, first : t + 1], v[h // shared, first : t + 1]
            scores = keys @ q[h, t] * (dim**-0.5 if params.scale is None else params.scale)
            if params.softcap is not None:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            out.append(scores.softmax(0) @ values)
    return torch.stack(out).view(tokens, heads, dim)


def one_by_one(lengths: list[int], q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([by_hand(a, b, c, params) for a, b, c in parts if a.shape[1]])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(lambda n: sum(n) > 0),
    kv_heads=st.sampled_from([1, 2]),
    shared=st.sampled_from([1, 3]),
    params=PARAMS,
    seed=st.integers(0, 99),
    kernel=st.booleans(),
)
@example(lengths=[1], kv_heads=1, shared=1, params=AttentionParams(), seed=0, kernel=True)
@example(lengths=[4, 4, 4, 1, 1, 6, 4], kv_heads=2, shared=3, params=AttentionParams(window=3), seed=0, kernel=True)
@example(
    lengths=[5, 5, 0, 2],
    kv_heads=2,
    shared=3,
    params=AttentionParams(window=3, softcap=1.5, scale=0.3),
    seed=0,
    kernel=True,
)
def test_a_sequence_attends_to_its_own_past_and_nothing_else(
    lengths: list[int], kv_heads: int, shared: int, params: AttentionParams, seed: int, kernel: bool
) -> None:
    noise = torch.Generator().manual_seed(seed)
    heads = (kv_heads * shared, kv_heads, kv_heads)
    q, k, v = (torch.randn(h, sum(lengths), DIM, generator=noise, dtype=torch.float64) * 2 for h in heads)
    given = [x.requires_grad_() for x in (q, k, v)]
    weight = torch.randn(sum(lengths), heads[0], DIM, generator=noise, dtype=torch.float64)
    with flash.on_cpu() if kernel else nullcontext():
        got = PackedAttention(lengths)(0, q, k, v, params)
    want = one_by_one(lengths, q, k, v, params)
    close = 1e-12 if params.softcap is None else 1e-5  # capped scores are float32
    assert torch.allclose(got, want, atol=close, rtol=close)
    grads = [torch.autograd.grad((out * weight).sum(), given) for out in (got, want)]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=10 * close, rtol=10 * close)


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.integers(1, 4),
    responses=st.lists(st.integers(0, 5), min_size=2, max_size=5),
    params=PARAMS,
    seed=st.integers(0, 99),
    kernel=st.booleans(),
)
def test_sequences_that_share_a_prompt_get_what_they_would_get_alone(
    prompt: int, responses: list[int], params: AttentionParams, seed: int, kernel: bool
) -> None:
    """Rows: the prompt, then all responses."""
    starts = np.cumsum([prompt, *responses]).tolist()
    sequences = [[*range(prompt), *range(a, a + n)] for a, n in zip(starts, responses, strict=False)]
    rows = [r for s in sequences for r in s]
    first_places = [rows.index(r) for r in range(starts[-1])]
    repeats = sorted({*range(len(rows))} - {*first_places})
    places = [torch.tensor(x) for x in (rows, first_places, repeats)]
    shared = SharedPrompts(places[0], places[1], places[2], (prompt + responses[0], *responses[1:]))
    noise = torch.Generator().manual_seed(seed)
    given = [torch.randn(h, starts[-1], DIM, generator=noise, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    weight = torch.randn(starts[-1], 4, DIM, generator=noise, dtype=torch.float64)
    lengths = [len(s) for s in sequences]
    with flash.on_cpu() if kernel else nullcontext():
        got = PackedAttention(lengths, shared)(0, given[0], given[1], given[2], params)
    q, k, v = (x[:, torch.tensor(rows)] for x in given)
    want = one_by_one(lengths, q, k, v, params)[shared.first_places]
    close = 1e-12 if params.softcap is None else 1e-5
    assert torch.allclose(got, want, atol=close, rtol=close)
    grads = [torch.autograd.grad((out * weight).sum(), given) for out in (got, want)]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=10 * close, rtol=10 * close)


def test_another_sequence_in_the_pack_does_not_change_a_single_bit() -> None:
    q, k, v = (torch.randn(2, 9, DIM) for _ in range(3))
    packed, before = PackedAttention([4, 5]), [x.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x[:, 4:] = 1e3 * torch.randn(2, 5, DIM)
    after = packed(0, q, k, v, AttentionParams())
    assert torch.equal(after[:4], packed(0, before[0], before[1], before[2], AttentionParams())[:4])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_logits_are_those_of_each_sequence_alone(arch: str) -> None:
    models = pair(arch)
    with torch.no_grad():
        got = models.packed(ROWS)
    want = torch.cat([models.alone(row) for row in ROWS])
    assert torch.allclose(got, want, atol=3e-5)


@pytest.mark.parametrize("arch", ["gemma2", "mistral"])
def test_the_sequences_are_longer_than_the_window(arch: str) -> None:
    """Otherwise the test above would not cover the window."""
    models = pair(arch)
    wide = deepcopy(models.config)
    wide.sliding_window = 100
    other = type(models.eager)._from_config(wide, attn_implementation="eager").eval()
    other.load_state_dict(models.eager.state_dict())
    far = Pair(other, models.ours).alone(ROWS[0])
    assert torch.allclose(far[:WINDOW], models.alone(ROWS[0])[:WINDOW], atol=1e-5)
    assert not torch.allclose(far[WINDOW:], models.alone(ROWS[0])[WINDOW:], atol=1e-2)


@pytest.mark.parametrize("arch", ["qwen2", "gemma2"])
def test_gradients_of_a_model_are_those_of_each_sequence_alone(arch: str) -> None:
    eager, ours = (deepcopy(m).requires_grad_() for m in (pair(arch).eager, pair(arch).ours))
    models = Pair(eager, ours)
    models.packed(ROWS).square().mean().backward()
    rows = [eager(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    torch.cat(rows).square().mean().backward()
    for (name, p), reference in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert reference.grad is not None
        scale = float(reference.grad.abs().max())
        assert torch.allclose(p.grad, reference.grad, atol=1e-4 * scale + 1e-7), name


def test_a_model_that_does_not_pass_keyword_arguments_on_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not hand keyword arguments on"):
        pair("qwen2").ours(input_ids=torch.tensor([[3, 4]]), use_cache=False)
