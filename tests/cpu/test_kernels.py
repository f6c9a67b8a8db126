"""Kernels compute what torch computes, to a few of float32's last bits."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import nn

from distflow import cpu
from distflow.cpu import kernels, products
from distflow.cpu.kernels import compiled
from distflow.model.attention import AttentionParams
from distflow.rollout import sampling
from distflow.rollout.builtin.panel_cache import PanelCache
from distflow.train.logprobs import token_logprobs

LAST_BIT = 2.0**-24


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@njit
def _each_exp(x, out):
    for i in range(len(x)):
        out[i] = kernels.exp(x[i])


@njit
def _each_tanh(x, out):
    for i in range(len(x)):
        out[i] = kernels.tanh(x[i])


@njit
def _each_log(x, out):
    for i in range(len(x)):
        out[i] = kernels.log(x[i])


def test_exp() -> None:
    x = np.linspace(-87, 87, 200_001).astype(np.float32)
    out = np.empty_like(x)
    _each_exp(x, out)
    assert np.abs(out / np.exp(x.astype(np.float64)) - 1).max() < 2 * LAST_BIT
    far = np.array([-np.inf, -1e30, 0, np.nan], np.float32)
    _each_exp(far, out)
    assert 0 <= out[0] == out[1] < 1e-37
    assert out[2] == 1
    assert np.isnan(out[3])


def test_tanh() -> None:
    x = np.linspace(-20, 20, 200_001).astype(np.float32)
    out = np.empty_like(x)
    _each_tanh(x, out)
    right = np.tanh(x.astype(np.float64))
    assert (np.abs(out - right) <= 4 * LAST_BIT * np.abs(right)).all()


def test_log() -> None:
    near = 1 - np.arange(1, 100) * LAST_BIT
    x = np.concatenate([np.geomspace(1e-37, 1e37, 100_001), near, 2 - near]).astype(np.float32)
    out = np.empty_like(x)
    _each_log(x, out)
    right = np.log(x.astype(np.float64))
    assert (np.abs(out - right) <= 4 * LAST_BIT * np.abs(right)).all()


def packed(*weights: np.ndarray) -> tuple[products.PackedWeight, ...]:
    """Copies of weights, packed."""
    made = tuple(products.PackedWeight(torch.from_numpy(w.copy())) for w in weights)
    for weight in made:
        weight.pack()
    return made


NO_BIAS = np.zeros(0, np.float32)


@given(st.integers(1, 110), st.integers(1, 40), st.lists(st.integers(1, 50), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_linear_layer_of_packed_weights(rows: int, dim: int, widths: list[int], biased: bool) -> None:
    draw = np.random.default_rng(rows * 1000 + dim)

    def some(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32)

    matrices = [some(n, dim) for n in widths]
    weights = packed(*matrices)
    x, out = some(rows, dim), np.full((rows, sum(widths)), np.nan, np.float32)
    bias = some(out.shape[1]) if biased else NO_BIAS
    kernels.linear(x, tuple(w.parts for w in weights), bias, out)
    want = x.astype(np.float64) @ np.concatenate(matrices).T + (bias if biased else 0)
    np.testing.assert_allclose(out, want, atol=1e-4)
    for weight, before in zip(weights, matrices, strict=True):
        index = draw.integers(0, len(before), 9)
        assert (weight.rows(index) == before[index]).all()
        weight.unpack()
        assert (weight.array == before).all()


@pytest.mark.parametrize("dim", [16, 300, 1024])  # rows of 1024 numbers share places in a cache, and are copied
@pytest.mark.parametrize("columns", [5 * kernels.PANEL, 5 * kernels.PANEL + 3, 3])
@pytest.mark.parametrize("rows", [1, 101])
def test_a_product_of_any_two_matrices(rows: int, columns: int, dim: int) -> None:
    draw = np.random.default_rng(dim)
    a, b, before = (draw.standard_normal(s, np.float32) for s in ((rows, dim), (dim, columns), (rows, columns)))
    want = a.astype(np.float64) @ b
    for x in (a, np.asfortranarray(a)):
        for y in (b, np.asfortranarray(b)):
            out, more = np.full((rows, columns), np.nan, np.float32), before.copy()
            kernels.multiply(x, y, out, True)
            kernels.multiply(x, y, more, False)
            np.testing.assert_allclose(out, want, atol=1e-4)
            np.testing.assert_allclose(more, before + want, atol=1e-4)


def test_a_large_matrix_is_packed_in_pieces() -> None:
    draw = np.random.default_rng(0)
    x, matrix = (draw.standard_normal((n, 8192), np.float32) for n in (3, 25 * kernels.PANEL))  # 256 rows at once
    out = np.full((3, len(matrix)), np.nan, np.float32)
    kernels.multiply(x, matrix.T, out, True)
    np.testing.assert_allclose(out, x.astype(np.float64) @ matrix.T, atol=2e-3)


@pytest.mark.parametrize("columns", [5, 16, 48, 64, 117, 304])
def test_a_row_of_a_product_does_not_depend_on_the_others(columns: int) -> None:
    """Nor on whether the weight is packed."""
    draw = np.random.default_rng(columns)
    x, weight = draw.standard_normal((110, 300), np.float32), draw.standard_normal((columns, 300), np.float32)
    panels, whole = tuple(w.parts for w in packed(weight)), np.empty((110, columns), np.float32)
    kernels.linear(x, panels, NO_BIAS, whole)
    for n in range(1, 110):
        some, more = np.empty((n, columns), np.float32), np.empty((n, columns), np.float32)
        kernels.linear(x[-n:], panels, NO_BIAS, some)
        kernels.multiply(x[-n:], weight.T, more, True)
        assert (some == whole[-n:]).all()
        assert (more == whole[-n:]).all()


def test_products_add_to_large_numbers_without_losing_small_terms() -> None:
    """A gradient may be thousands of times what some rows add to it: term by term it would be rounded off."""
    draw = np.random.default_rng(0)
    x, matrix = (draw.standard_normal((16, 1500), np.float32) for _ in range(2))
    out = np.full((16, 16), 3000, np.float32)
    want = out + x.astype(np.float64) @ matrix.T
    kernels.multiply(x, matrix.T, out, False)
    blocks = -(-1500 // 256)
    assert np.abs(out / want - 1).max() < blocks * LAST_BIT


@pytest.mark.parametrize("dim", [1, 7, 64, 200])
def test_norm(dim: int) -> None:
    x, weight = torch.randn(5, dim), torch.randn(dim)
    out = np.empty((5, dim), np.float32)
    kernels.norm(x.numpy(), weight.numpy(), np.float32(1e-3), out)
    want = torch.nn.functional.rms_norm(x.double(), (dim,), weight.double(), 1e-3)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 61, 1024, 5000])
def test_gumbel_sample(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(300, vocabulary)
    logits[::7, 1:] = -torch.inf  # as top-k and top-p leave them
    keys = sampling.noise_keys(5, np.arange(300), np.arange(300) % 11)
    got, logprobs = sampling.gumbel_sample(logits, keys)
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    want, right = sampling.gumbel_sample(logits, keys)
    assert (got[::7] == 0).all()
    assert len(got.unique()) > 1
    assert (got != want).sum() <= 1  # where two tie
    torch.testing.assert_close(logprobs[got == want], right[got == want])


def test_many_unlikely_tokens_count_together() -> None:
    """Each of 50,000 tokens is less than the last bit of the one that is likely; all together are not."""
    logits = torch.full((2, 50_000), -17.0)
    logits[:, 333] = 0
    right = logits.double().log_softmax(-1)
    logprobs, entropy = (np.empty(2, np.float32) for _ in range(2))
    targets = np.array([333, 7])
    kernels.token_logprobs(logits.numpy(), targets, logprobs, entropy)
    want = right[torch.arange(2), torch.from_numpy(targets)].numpy()
    np.testing.assert_allclose(logprobs, want, rtol=2 * LAST_BIT, atol=3e-6)  # the likely one's neighbours are lost
    np.testing.assert_allclose(entropy, -(right.exp() * right).sum(-1), rtol=1e-3)


@pytest.mark.parametrize("where", [slice(None), 0, 17, 39])
def test_nan_is_passed_on_and_does_not_crash(where: slice | int) -> None:
    logits = torch.randn(3, 40)
    logits[:, where] = torch.nan
    tokens, logprobs = sampling.gumbel_sample(logits, sampling.noise_keys(5, np.arange(3), np.arange(3)))
    assert ((tokens >= 0) & (tokens < 40)).all()
    assert logprobs.isnan().all()
    cache = PanelCache(1, 8)
    q, k, v = torch.randn(2, 1, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    panels = cache.panels_of(0, k.transpose(0, 1))
    panels.keys[:] = panels.values[:] = 0
    panels.keys[0, 0, 0, 2, 3] = np.nan

    def decoded(place: int) -> torch.Tensor:
        table, start = np.zeros((1, 1), np.int64), np.array([place])
        return cache.attention(start, start + 1, table, torch.device("cpu"))(0, q, k, v, AttentionParams())

    assert decoded(5).isnan().all()
    assert not decoded(2).isnan().any()


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_of_the_vocabulary_is_an_error(target: int) -> None:
    with pytest.raises(IndexError):
        token_logprobs(torch.randn(2, 4), torch.randn(7, 4), None, torch.tensor([3, target]))


def test_kernels_are_for_float32() -> None:
    x = torch.zeros(1)
    assert cpu.kernels_for(x, nn.Parameter(x)) is kernels
    assert cpu.kernels_for(x, x.bfloat16()) is None
    assert cpu.kernels_for(x.to("meta")) is None


@given(st.integers(0, 40), st.integers(1, 5))
def test_threads_share_the_work(count: int, threads: int) -> None:
    torch.set_num_threads(threads)
    done: list[int] = []

    def fail(some: slice) -> None:
        raise ZeroDivisionError

    cpu.in_threads(lambda some: done.extend(range(count)[some]), count, 1 << 30)
    assert sorted(done) == list(range(count))
    with pytest.raises(ZeroDivisionError):
        cpu.in_threads(fail, 4, 1 << 30)


def test_without_numba_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cpu, "import_module", absent)
    cpu._kernels.cache_clear()
    try:
        assert cpu.kernels_for(torch.zeros(1)) is None
        assert cpu.prefers_transposed(torch.float32, torch.device("cpu"))
    finally:
        cpu._kernels.cache_clear()
    assert not cpu.prefers_transposed(torch.bfloat16, torch.device("meta"))


def test_a_change_of_any_kernel_makes_all_be_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`linear` is in another file than the kernels that call it."""
    key = kernels.before_attention._cache._index_key
    codegen = kernels.before_attention.targetctx.codegen()
    before = key((), codegen)
    assert key((), codegen) == before
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * (p.name == "products.py"))
    compiled._stamp.cache_clear()
    try:
        assert key((), codegen) != before
    finally:
        compiled._stamp.cache_clear()
