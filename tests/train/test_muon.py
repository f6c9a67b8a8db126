"""Muon's step is that of torch.optim.Muon, and AdamW's for what is no matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distflow.train.muon import Muon, is_matrix, orthogonal
from distflow.weights.shards import TensorSpec


class Alone:
    """The exchange of a rank that has everything."""

    def __init__(self, *specs: TensorSpec) -> None:
        self.specs = {s.name: s for s in specs}

    def apply(self, function: Any, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: function(x) for name, x in shards.items()}


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_the_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    noise = torch.Generator().manual_seed(1)
    start, grads = torch.randn(shape, generator=noise), torch.randn(4, *shape, generator=noise)
    ours, theirs, bias, other = (
        nn.Parameter(x) for x in (start.clone(), start.clone(), start[0].clone(), start[0].clone())
    )
    exchange: Any = Alone(TensorSpec("w", shape))
    groups = [
        {"params": [bias], "weight_decay": 0.0},
        {"params": [ours], "names": ["w"], "weight_decay": 0.1, "muon": True},
    ]
    muon = Muon(groups, exchange, lr=0.02)
    # Its iterations are in 16 bits.
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([other], lr=0.02, weight_decay=0.0)
    for grad in grads:
        ours.grad, theirs.grad, bias.grad, other.grad = grad, grad.clone(), grad[0], grad[0].clone()
        for optimizer in (muon, torchs, adamw):
            optimizer.step()
    assert torch.equal(bias, other)
    moved = (theirs - start).norm()
    assert float((ours - theirs).norm() / moved) < 0.02
    assert float((ours - start).norm() / moved) == pytest.approx(1, rel=0.02)


def test_stacked_matrices_are_made_orthogonal_each_by_itself() -> None:
    stacked = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(2))
    got = orthogonal(stacked)
    for i in range(3):
        torch.testing.assert_close(got[i], orthogonal(stacked[i]))
        values = torch.linalg.svdvals(got[i])
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert torch.equal(orthogonal(torch.zeros(4, 4)), torch.zeros(4, 4))


def test_what_is_a_matrix() -> None:
    shapes = {(4, 4): True, (3, 4, 4): True, (4,): False, (1, 4): False, (4, 1): False}
    assert {shape: is_matrix(TensorSpec("w", shape)) for shape in shapes} == shapes
