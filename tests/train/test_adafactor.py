"""Adafactor's step is that of torch.optim.Adafactor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from distflow.config.schema import LoraConfig, TrainConfig
from distflow.plan import Layout
from distflow.train import fsdp
from distflow.train.adafactor import Adafactor, moments_of
from distflow.weights.shards import Shards, TensorSpec

SHAPES = {"matrix": (12, 20), "tall": (9, 4), "stacked": (3, 6, 5), "vector": (7,)}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The mesh of one rank, in which sums are its own."""
    monkeypatch.setattr(fsdp, "sharding", lambda mesh: SimpleNamespace(get_group=lambda: None))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    return {"tp": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}


def make(alone: Any, params: dict[str, nn.Parameter], **options: Any) -> Adafactor:
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in params.items()]
    group = {"params": list(params.values()), "specs": specs, "weight_decay": 0.1}
    return Adafactor([group], Shards(Layout((0,), 1), 1), alone, 0, **options)


@pytest.mark.parametrize("lr", [1e-2, 0.4])  # at the rate, and below it when 1/√step is
def test_the_steps_are_those_of_torch(alone: Any, lr: float) -> None:
    noise = torch.Generator().manual_seed(1)
    ours = {name: nn.Parameter(torch.randn(shape, generator=noise)) for name, shape in SHAPES.items()}
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    mine, torchs = make(alone, ours, lr=lr), torch.optim.Adafactor(theirs, lr=lr, weight_decay=0.1)
    for step in range(12):
        for p, other in zip(ours.values(), theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=noise) * (0.0 if step == 5 else 10.0 ** (step % 4 - 2))
            other.grad = p.grad.clone()
        mine.step()
        torchs.step()
        for (name, p), other in zip(ours.items(), theirs, strict=True):
            torch.testing.assert_close(p, other, rtol=2e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]


def test_gradients_are_scaled_and_a_step_may_be_skipped(alone: Any) -> None:
    noise = torch.Generator().manual_seed(2)
    grads = [{n: torch.randn(s, generator=noise) for n, s in SHAPES.items()} for _ in range(3)]
    start = {n: torch.randn(s, generator=noise) for n, s in SHAPES.items()}
    results = []
    for skipped in (False, True):
        params = {n: nn.Parameter(x.clone()) for n, x in start.items()}
        optimizer = make(alone, params, lr=1e-2)
        for i, grad in enumerate(grads):
            if skipped and i == 1:
                for p in params.values():
                    p.grad = torch.full_like(p, torch.nan)
                optimizer.found_inf = torch.tensor(1.0)
                optimizer.step()
            for n, p in params.items():
                p.grad = 4 * grad[n] if skipped else grad[n].clone()
            optimizer.found_inf = torch.tensor(0.0)
            optimizer.grad_scale = torch.tensor(4.0) if skipped else None
            optimizer.step()
        results.append((params, {n: optimizer.state[p] for n, p in params.items()}))
    (plain, state), (scaled, other) = results
    for name in SHAPES:
        assert torch.equal(plain[name], scaled[name]), name
        assert state[name].keys() == other[name].keys() == {"step", *moments_of(TensorSpec(name, SHAPES[name]))}
        for key in state[name]:
            assert torch.equal(state[name][key], other[name][key]), (name, key)


def test_keys_without_effect_are_refused() -> None:
    for key, value in (("betas", [0.8, 0.9]), ("eps", 1e-6)):
        with pytest.raises(ValidationError, match=f"`{key}` has no effect with `optimizer: adafactor`"):
            TrainConfig.model_validate({"optimizer": "adafactor", key: value})
    with pytest.raises(ValidationError, match="`offload: all` is for `optimizer: adamw`, not for adafactor"):
        TrainConfig.model_validate({"optimizer": "adafactor", "offload": "all"})
    with pytest.raises(ValidationError, match="`use_dora`: DoRA scales each row of the merged weight"):
        LoraConfig.model_validate({"use_dora": True})
