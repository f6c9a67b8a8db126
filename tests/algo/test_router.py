"""The load of experts, and the loss that evens it out: against loops in float64, and split in any way."""

import numpy as np
import torch

from distflow.algo.router import balance_loss, expert_counts


def test_the_balance_loss_is_that_of_a_loop_and_of_its_samples_alone() -> None:
    noise = np.random.default_rng(2)
    lengths, experts, k = [4, 0, 7, 1], 5, 2
    logits = torch.tensor(noise.normal(size=(12, experts)), requires_grad=True)
    chosen = torch.tensor([noise.choice(experts, k, replace=False) for _ in range(12)])
    sample = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    got = balance_loss(logits, chosen, sample, torch.tensor(lengths))
    want, start = [], 0
    for n in lengths:
        rows = range(start, start + n)
        start += n
        exps = {t: np.exp(logits[t].detach().numpy()) for t in rows}
        loss = 0.0
        for e in range(experts):
            share = sum(int(e in chosen[t].tolist()) for t in rows) / (k * max(n, 1))
            loss += share * sum(exps[t][e] / exps[t].sum() for t in rows)
        want.append(experts * loss)
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-5)
    alone = balance_loss(logits[4:11], chosen[4:11], torch.zeros(7, dtype=torch.int64), torch.tensor([7]))
    torch.testing.assert_close(alone[0], got[2])
    got.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_even_choices_cost_one_and_one_expert_costs_as_many_as_there_are() -> None:
    one = torch.zeros(8, dtype=torch.int64)
    even = balance_loss(torch.zeros(8, 4), torch.arange(8)[:, None] % 4, one, torch.tensor([8]))
    assert float(even) / 8 == 1
    collapsed = torch.full((8, 4), -50.0).index_fill(1, torch.tensor([2]), 50.0)
    assert float(balance_loss(collapsed, torch.full((8, 1), 2), one, torch.tensor([8]))) / 8 == 4


def test_counts_are_of_every_choice() -> None:
    assert expert_counts(torch.tensor([[0, 3], [3, 1]]), 5).tolist() == [1, 1, 0, 2, 0]


def test_the_loss_evens_out_a_router_that_has_collapsed() -> None:
    noise = torch.Generator().manual_seed(0)
    x, router = torch.randn(64, 8, generator=noise), torch.randn(4, 8, generator=noise)
    x[:, 0], router[:, 0] = 1, torch.tensor([9.0, 0, 0, 0])  # the first expert is chosen whatever the token is
    router.requires_grad_()
    ratios = list[float]()
    for _ in range(300):
        logits = x @ router.T
        chosen = logits.topk(1).indices
        ratios.append(float(expert_counts(chosen, 4).max()) / 16)
        loss = balance_loss(logits, chosen, torch.zeros(64, dtype=torch.int64), torch.tensor([64])).sum() / 64
        (grad,) = torch.autograd.grad(loss, router)
        router.data -= grad
    assert ratios[0] > 3.5
    assert ratios[-1] < 1.5
