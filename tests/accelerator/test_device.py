"""The rehearsal's device can be trusted: its numbers are the CPU's, and it takes no CPU tensor that CUDA refuses."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from accelerator.rehearse import REHEARSED, rehearse

pytestmark = pytest.mark.skipif(not REHEARSED, reason="tests the rehearsal itself")


def compute(device: str) -> list[NDArray[np.float32]]:
    """Returns values and gradients of a bit of everything."""
    noise = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 4, generator=noise).to(device).requires_grad_() for n in (6, 3))
    y = torch.nn.functional.linear(x, w).log_softmax(-1)
    gathered = y.gather(1, torch.arange(6, device=device)[:, None] % 3)[:, 0]
    q, k = (torch.randn(2, h, 5, 4, generator=noise).to(device).requires_grad_() for h in (4, 2))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    (gathered.sum() + attended.square().sum()).backward()
    weight = torch.nn.Parameter(w.detach().clone())
    weight.grad = w.grad
    torch.optim.AdamW([weight], fused=True).step()
    transposed = x[:, 1:3].T.contiguous()
    tensors = [gathered, attended, x.grad, w.grad, q.grad, k.grad, weight, transposed, x.sort().values]
    return [t.detach().cpu().numpy() for t in tensors if t is not None]


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {  # of a tensor of the device and one of the CPU
    "add": lambda x, c: x + c,
    "add in place": lambda x, c: c.add_(x),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "matmul": lambda x, c: x @ c.T,
    "cat": lambda x, c: torch.cat([x, c]),
    "gather": lambda x, c: x.gather(1, c.long()),
    "index_select": lambda x, c: x.index_select(0, c.long()[0]),
    "index of the device": lambda x, c: c[x.long()],
    "values of the CPU": lambda x, c: x.index_put_((c.long()[0],), c),
    "embedding": lambda x, c: torch.nn.functional.embedding(c.long(), x),
    "numpy": lambda x, c: x.numpy(),
    "dlpack": lambda x, c: np.from_dlpack(x),
    "scalar in a matrix product": lambda x, c: torch.addmm(c[0, 0], x, x),
    "steps of a fused optimiser": lambda x, c: torch._fused_adamw_(
        [x], [x.clone()], [x.clone()], [x.clone()], [], [c[0, 0]], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0,
        eps=1e-8, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


def mix_devices() -> dict[str, str | None]:
    """Returns the error of each operation, None if there was none."""
    errors: dict[str, str | None] = {}
    for name, mix in MIXED.items():
        try:
            mix(torch.ones(3, 3, device="rehearsal"), torch.zeros(3, 3))
            errors[name] = None
        except (RuntimeError, TypeError, ValueError) as e:
            errors[name] = str(e)
    return errors


def use_cpu_scalars_and_indices() -> list[float]:
    x = torch.arange(6.0, device="rehearsal").view(2, 3)
    x[torch.tensor([0])] = 1.0
    return [float((x * torch.tensor(2.0)).sum()), float(x[:, torch.tensor([2, 0])].sum()), float(x.cpu().numpy().sum())]


def reduce_over_ranks(rank: int) -> tuple[list[float], str]:
    """Returns a sum over the ranks, and the error of a process group that is for the CPU only."""
    x = torch.tensor([1.0 + rank], device="rehearsal")
    dist.all_reduce(x)
    cpu_only = dist.new_group([0, 1], backend="gloo")
    try:
        dist.all_reduce(x, group=cpu_only)
    except RuntimeError as e:
        return x.tolist(), str(e)
    return x.tolist(), ""


def all_of_it(rank: int) -> Any:
    reduced = reduce_over_ranks(rank)
    pairs = list(zip(compute("rehearsal"), compute("cpu"), strict=True))
    return pairs, mix_devices(), use_cpu_scalars_and_indices(), reduced


@pytest.fixture(scope="module")
def results() -> Any:
    return rehearse(2, all_of_it)


def test_its_numbers_are_those_of_the_cpu(results: Any) -> None:
    for ours, theirs in results[0][0]:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", MIXED)
def test_it_refuses_cpu_tensors(results: Any, operation: str) -> None:
    assert results[0][1][operation] is not None


def test_it_takes_scalars_and_indices_from_the_cpu(results: Any) -> None:
    assert results[0][2] == [30.0, 10.0, 15.0]


def test_it_reduces_in_process_groups_that_are_for_it(results: Any) -> None:
    for *_, (total, error) in results:
        assert total == [3.0]
        assert "the process group is not for rehearsal" in error
