"""A model with CPU modules computes what it did before, and the same gradients."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow import cpu
from distflow.cpu import modules, products
from distflow.model.attention import PackedAttention
from distflow.model.experts import use_experts_blocks
from distflow.model.tensor_parallel import parameter_specs, tp_styles
from tiny import ARCHITECTURES, pair, randomize_weights

LENGTHS = [9, 9, 4, 1]


@pytest.fixture(params=[("kernels", 1), ("kernels", 2), ("torch", 1)], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    backend, count = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    monkeypatch.setattr(cpu, "_PART", 1)  # one is worth a thread
    if backend == "torch":
        monkeypatch.setattr(cpu, "_kernels", lambda: None)
    yield backend
    torch.set_num_threads(threads)


def logits_of(model: PreTrainedModel) -> Tensor:
    """Returns the logits of sequences of LENGTHS."""
    return model(
        input_ids=torch.arange(3, 26)[None],
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        use_cache=False,
        distflow=PackedAttention(LENGTHS),
    ).logits


def operations_of(x: Tensor) -> set[str]:
    """Returns the operations of its autograd graph."""
    nodes, open_ = set(), [x.grad_fn]
    while open_:
        if (one := open_.pop()) is not None and one not in nodes:
            nodes.add(one)
            open_ += [before for before, _ in one.next_functions]
    return {one.name() for one in nodes}


def run(model: PreTrainedModel) -> dict[str, Tensor]:
    """Logits, and gradients of something that depends on all of them."""
    model.zero_grad()
    torch.manual_seed(1)
    logits = logits_of(model)
    (logits * torch.randn(logits.shape)).sum().backward()
    return {"": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_outputs_and_gradients(arch: str, backend: str) -> None:
    model = deepcopy(pair(arch).ours).requires_grad_(True)
    plain, right = run(model), run(deepcopy(model).double())
    assert len(right) == 1 + len(list(model.parameters()))
    modules.use_cpu_modules(model)
    got = run(model)
    assert got.keys() == right.keys()
    for name, exact in right.items():
        size = exact.norm()
        wrong, before = ((x[name] - exact).norm() / size for x in (got, plain))
        assert wrong < max(4 * before, 1e-5), name
    family, everywhere = {"_NormFunctionBackward", "_GateBackward"}, {"_LinearBackward", "_AttentionBackward"}
    used = operations_of(logits_of(model)) & (family | everywhere)
    assert used == (set() if backend == "torch" else everywhere | (set() if arch.startswith("gemma") else family))


def test_frozen_parameters_get_no_gradient() -> None:
    model = deepcopy(pair("qwen2").ours).requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad_(True)
    want = run(model)
    modules.use_cpu_modules(model)
    got = run(model)
    assert got.keys() == want.keys() == {"", "model.layers.1.self_attn.q_proj.weight"}
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_bfloat16_is_left_to_the_original_modules() -> None:
    model = deepcopy(pair("llama").ours).bfloat16().requires_grad_(True)
    want = run(model)
    modules.use_cpu_modules(model)
    torch.testing.assert_close(run(model), want, atol=0, rtol=0)


@pytest.mark.parametrize("arch", ["qwen2", "gemma2", "qwen3_moe"])
def test_packed_weights_may_be_parts_of_the_layers(arch: str, backend: str) -> None:
    """As tensor parallelism cuts them, which leaves a layer's own numbers of features as they were."""
    model = deepcopy(pair(arch).ours).requires_grad_(False)
    use_experts_blocks(model)
    randomize_weights(model)
    modules.use_cpu_modules(model)
    for spec in parameter_specs(model, tp_styles(model, 2, "")):
        if spec.tp_dim is not None:
            p = model.get_parameter(spec.name)
            p.data = p.data.chunk(2, spec.tp_dim)[1].clone()
    want = logits_of(model)
    with modules.packed_modules(model):
        assert any(getattr(m, "packed", None) for m in model.modules()) == (backend == "kernels")
        torch.testing.assert_close(logits_of(model), want, atol=0, rtol=0)
    torch.testing.assert_close(logits_of(model), want, atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (40, 17), (32, 20)])
def test_products(shape: tuple[int, int]) -> None:
    a, b = torch.randn(7, shape[1]), torch.randn(*shape)
    torch.testing.assert_close(products.multiply(a, b.T), a @ b.T)
    torch.testing.assert_close(products.multiply(a.T, a), a.T @ a)
    out = torch.empty(9, 7)[1:8]
    assert products.multiply(a, a.T, out) is out
    torch.testing.assert_close(out, a @ a.T)
    products.add_product(a, a.T, out)
    torch.testing.assert_close(out, 2 * (a @ a.T))
    bias = torch.randn(shape[0])
    torch.testing.assert_close(products.linear(a, b, bias), nn.functional.linear(a, b, bias))
    torch.testing.assert_close(products.linear(a, b, None), a @ b.T)


def test_products_of_no_rows_are_zero() -> None:
    torch.testing.assert_close(products.multiply(torch.randn(0, 3).T, torch.randn(0, 5)), torch.zeros(3, 5))
    assert products.linear(torch.randn(0, 3), torch.randn(5, 3), None).shape == (0, 5)


def test_weights_may_be_freed_after_a_product(backend: str) -> None:
    """As FSDP does with gathered weights."""
    layer, x = modules.CpuLinear(4, 3), torch.randn(2, 4)
    layer(x).sum().backward()
    layer.weight.untyped_storage().resize_(0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_groups_of_rows_are_multiplied_by_a_matrix_each(counts: list[int]) -> None:
    ends = torch.tensor(counts).cumsum(0)
    x = torch.randn(int(ends[-1]), 7, requires_grad=True)
    weight = torch.randn(len(counts), 9, 7, requires_grad=True)
    out = products.grouped_linear(x, weight, ends)
    want = torch.cat([part @ w.T for part, w in zip(x.split(counts), weight, strict=True)])
    torch.testing.assert_close(out, want)
    slope = torch.randn(out.shape)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weight), slope) for y in (out, want)), strict=True):
        torch.testing.assert_close(ours, theirs)
