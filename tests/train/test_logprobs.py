"""Log-probs and entropy in chunks: the values and gradients of the plain formula, without its memory."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distflow.batch.batch import Batch, Column, Ragged
from distflow.device.sizes import CPU
from distflow.rollout.engine import Request, SamplingParams
from distflow.train import logprobs
from distflow.train.heads import LogprobHead
from distflow.train.logprobs import token_energy, token_logprobs, top_logprobs
from distflow.train.packing import pack
from rollout.plain_loop import complete, generator_for
from tiny import ARCHITECTURES, VOCABULARY, pair

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]
WAYS = list(product([1.0, 0.6, 2.5], [None, 1.5]))  # temperature, soft cap


def plain_formula(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def some(tokens: int, width: int, vocabulary: int, bias: bool, dtype: torch.dtype = torch.float64) -> Inputs:
    noise = torch.Generator().manual_seed(tokens)
    hidden, weight, offset = (
        torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    targets = torch.randint(vocabulary, (tokens,), generator=noise)
    return hidden, weight, offset if bias else None, targets


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks of 16 tokens."""
    monkeypatch.setattr(logprobs, "sizes_of", lambda device: replace(CPU, logits=1, logit_tokens=16))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("temperature", "softcap"), WAYS)
def test_the_energy_is_the_squared_gradient_by_the_logits(temperature: float, softcap: float | None) -> None:
    hidden, weight, bias, targets = some(53, 6, 31, bias=True)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    capped = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    capped = capped.detach().requires_grad_()
    torch.log_softmax(capped, -1).gather(1, targets[:, None]).sum().backward()
    assert capped.grad is not None
    got = token_energy(hidden, weight, bias, targets, temperature, softcap)
    torch.testing.assert_close(got, capped.grad.square().sum(-1))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("temperature", "softcap"), WAYS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 53])
def test_values_and_gradients_are_those_of_the_plain_formula(
    tokens: int, bias: bool, temperature: float, softcap: float | None
) -> None:
    given = some(tokens, 7, 11, bias)
    leaves = [x for x in given[:3] if x is not None]
    ours, theirs = token_logprobs(*given, temperature, softcap), plain_formula(*given, temperature, softcap)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
    up, down = torch.randn(tokens, dtype=torch.float64), torch.randn(tokens, dtype=torch.float64)
    for weights in ((up, down), (up, 0 * down), (0 * up, down)):
        grads = [torch.autograd.grad(out, leaves, weights, retain_graph=True) for out in (ours, theirs)]
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("temperature", "softcap"), WAYS)
@pytest.mark.parametrize("threads", [1, 2])  # with one, in kernels
def test_in_float32_they_are_those_of_float64(temperature: float, softcap: float | None, threads: int) -> None:
    exact, given = (some(53, 7, 61, True, dtype) for dtype in (torch.float64, torch.float32))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, theirs = token_logprobs(*given, temperature, softcap), plain_formula(*exact, temperature, softcap)
        torch.testing.assert_close([x.double() for x in ours], list(theirs), rtol=1e-5, atol=1e-5)
        up, down = torch.randn(53), torch.randn(53)
        for weights in ((up, down), (up, 0 * down), (0 * up, down)):
            got = torch.autograd.grad(ours, given[:3], weights, retain_graph=True)  # type: ignore[arg-type]
            want = torch.autograd.grad(theirs, exact[:3], [w.double() for w in weights], retain_graph=True)  # type: ignore[arg-type]
            torch.testing.assert_close([x.double() for x in got], list(want), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("temperature", "softcap"), WAYS)
def test_gradients_pass_the_numerical_check(temperature: float, softcap: float | None) -> None:
    hidden, weight, bias, targets = some(18, 2, 4, bias=True)
    assert bias is not None

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, bias, targets, temperature, softcap)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *leaves: both(*leaves)[1], (hidden, weight, bias))  # the entropy alone


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tokens", [1, 53])
def test_several_tokens_at_each_place_have_the_log_probs_of_each(tokens: int) -> None:
    hidden, weight, bias, one = some(tokens, 7, 11, bias=True)
    assert bias is not None
    several = torch.stack((one, one, (one + 3) % 11, (one + 5) % 11), 1)  # the same one may be there twice
    ours, entropy = token_logprobs(hidden, weight, bias, several, 0.6, 1.5)
    each = [plain_formula(hidden, weight, bias, t, 0.6, 1.5) for t in several.unbind(1)]
    theirs = torch.stack([logprobs for logprobs, _ in each], 1)
    torch.testing.assert_close((ours, entropy), (theirs, each[0][1]))
    up, down = torch.randn(tokens, 4, dtype=torch.float64), torch.randn(tokens, dtype=torch.float64)
    for pair_, weights in (((ours, theirs), up), ((entropy, each[0][1]), down)):
        got, want = (torch.autograd.grad(o, (hidden, weight, bias), weights, retain_graph=True) for o in pair_)
        torch.testing.assert_close(got, want)
    sums = ours.sum() + 2 * entropy.sum(), theirs.sum() + 2 * each[0][1].sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, (hidden, weight, bias)) for x in sums))


@pytest.mark.usefixtures("small_chunks")
def test_the_likeliest_tokens_are_of_the_vocabulary_that_both_have() -> None:
    hidden, weight, bias, _ = some(53, 7, 11, bias=True)
    assert bias is not None
    whole = torch.log_softmax(1.5 * torch.tanh((hidden @ weight.T + bias) / 1.5) / 0.6, -1)
    for k, vocabulary in ((3, 11), (3, 8), (20, 8)):
        ids, logprobs = top_logprobs(hidden, weight, bias, k, vocabulary, 0.6, 1.5)
        want = whole[:, :vocabulary].topk(min(k, vocabulary))
        assert torch.equal(ids, want.indices.int())
        torch.testing.assert_close(logprobs, want.values)


def test_a_loss_may_use_the_log_probs_alone() -> None:
    """There is no gradient for the entropy then."""
    given = some(5, 3, 4, bias=False)
    ours = torch.autograd.grad(token_logprobs(*given)[0].sum(), given[:2])
    theirs = torch.autograd.grad(plain_formula(*given, 1.0, None)[0].sum(), given[:2])
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("chunk", [1, 23 * 20, 1 << 20])
def test_the_chunk_size_does_not_change_the_values(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "sizes_of", lambda device: replace(CPU, logits=chunk, logit_tokens=16))
    hidden, weight, _, targets = some(70, 5, 23, bias=False, dtype=torch.float32)
    want = plain_formula(hidden.double(), weight.double(), None, targets, 0.8, 2.0)
    for a, b in zip(token_logprobs(hidden, weight, None, targets, 0.8, 2.0), want, strict=True):
        assert a.dtype == torch.float32
        assert torch.allclose(a.double(), b, atol=1e-5)


def test_extreme_logits_give_finite_values() -> None:
    hidden, weight = torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    got, entropy = token_logprobs(hidden, weight, None, torch.tensor([0, 0, 2]))
    assert got.tolist() == pytest.approx([0.0, -2e4, -np.log(3)])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, np.log(3)], abs=1e-6)
    (got.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_bfloat16_gives_float32_from_the_same_logits() -> None:
    given = some(40, 6, 9, bias=True, dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(*given[:3]).float()
    want = logits.log_softmax(-1).gather(1, given[3][:, None])[:, 0]
    got, entropy = token_logprobs(*given)
    assert got.dtype == entropy.dtype == torch.float32
    assert torch.allclose(got, want, atol=1e-5)
    got.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in given[:3] if x is not None)


class Largest(TorchDispatchMode):
    """Records the largest tensor that is made, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.add(str(func.overloadpacket))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def largest(compute: Any, given: Inputs) -> Largest:
    with Largest() as seen:
        first, second = compute(*given, 0.7, 2.0)
        (first + second).sum().backward()
    assert "aten.scatter_add_" in seen.operations or compute is plain_formula  # it saw the backward pass
    return seen


@pytest.mark.usefixtures("small_chunks")
def test_tokens_by_vocabulary_are_never_held() -> None:
    tokens, vocabulary = 200, 30
    given = some(tokens, 4, vocabulary, bias=True)
    assert largest(token_logprobs, given).elements <= max(16 * vocabulary, given[0].numel())
    assert largest(plain_formula, given).elements >= tokens * vocabulary


@pytest.mark.usefixtures("small_chunks")
def test_a_frozen_output_layer_costs_no_gradient() -> None:
    trained, again = some(40, 4, 11, bias=True), some(40, 4, 11, bias=True)
    for x in again[1:3]:
        assert x is not None
        x.requires_grad_(False)
    seen, frozen = largest(token_logprobs, trained), largest(token_logprobs, again)
    assert again[0].grad is not None
    assert trained[0].grad is not None
    assert torch.equal(again[0].grad, trained[0].grad)
    assert seen.operations - frozen.operations >= {"aten.addmm_", "aten.zeros_like"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_trainer_gives_a_response_the_log_probs_it_was_sampled_with(arch: str) -> None:
    models, noise = pair(arch), np.random.default_rng(3)
    prompts = [noise.integers(0, VOCABULARY, n).tolist() for n in (4, 9, 1, 4)]
    params = SamplingParams(max_tokens=8, temperature=0.8, stop=frozenset(range(6)))
    requests = [Request(i, tuple(prompts[i % 4]), params, 5) for i in range(8)]
    completions = complete(generator_for(models.ours, 3), requests)
    columns: dict[str, Column] = {
        "prompt_tokens": Ragged.of([torch.tensor(r.prompt) for r in requests]),
        "response_tokens": Ragged.of([torch.from_numpy(c.tokens) for c in completions]),
    }
    batch = Batch(np.arange(8), np.arange(8), columns)
    packed = pack(batch, np.array([5, 0, 7, 2, 1]))
    with torch.no_grad():
        got, entropy = LogprobHead(models.ours)(packed, 0.8)
    sampled = torch.cat([torch.from_numpy(completions[i].logprobs) for i in packed.index])
    assert torch.allclose(got, sampled, atol=1e-4)
    logits = torch.cat([models.alone([*prompts[i % 4], *completions[i].tokens[:-1].tolist()]) for i in packed.index])
    assert packed.shared is not None  # two of them have one prompt
    # Where rows are shared, the first place of each is as good as the others.
    log_p = torch.log_softmax(logits[packed.shared.first_places[packed.keep]] / 0.8, -1)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-4)
