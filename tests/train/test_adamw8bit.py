"""AdamW with moments of 8 bits: torchao's step, on blocks that no layout cuts."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from distflow.config.schema import TrainConfig
from distflow.errors import ConfigError
from distflow.plan import Layout
from distflow.roles.context import shard_degree
from distflow.weights.shards import Shards, TensorSpec, slices

pytest.importorskip("torchao")

from distflow.train.adamw8bit import AdamW8bit, moments_of

SHAPES = {"wide": (8, 4096), "stacked": (3, 16, 128), "narrow": (40, 120), "vector": (128,)}
NOISE = torch.Generator().manual_seed(1)
START = {name: torch.randn(shape, generator=NOISE) for name, shape in SHAPES.items()}
GRADS = [{name: torch.randn(shape, generator=NOISE) for name, shape in SHAPES.items()} for _ in range(4)]


def run(ranks: int, rank: int, tp: int = 1, scale: float = 1.0, skip: bool = False) -> tuple[AdamW8bit, dict[str, Any]]:
    """Makes steps with a rank's shards; tensor parallelism cuts the last dimension of `wide`."""
    shards = Shards(Layout(tuple(range(ranks)), ranks // tp, tp), ranks // tp)
    specs = {n: TensorSpec(n, s, 1 if tp > 1 and n == "wide" else None) for n, s in SHAPES.items()}
    boxes = {name: slices(shards.box(spec, rank)) for name, spec in specs.items()}
    params = {name: nn.Parameter(START[name][box].clone()) for name, box in boxes.items()}
    optimizer = AdamW8bit(list(params.values()), lr=1e-2, weight_decay=0.1)
    for name, p in params.items():
        moments = {k: m.zeros(shards, rank, p.device) for k, m in moments_of(specs[name]).items()}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    for i, grads in enumerate(GRADS):
        if skip and i == 2:
            optimizer.found_inf = torch.tensor(1.0)
            for p in params.values():
                p.grad = torch.full_like(p, torch.nan)
            optimizer.step()
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(scale) if scale != 1 else None
        for name, p in params.items():
            p.grad = scale * grads[name][boxes[name]]
        optimizer.step()
    return optimizer, {name: (p.detach(), optimizer.state[p], boxes[name]) for name, p in params.items()}


def test_weights_are_near_those_of_float32() -> None:
    _, ours = run(1, 0)
    theirs = {name: nn.Parameter(x.clone()) for name, x in START.items()}
    adamw = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1)
    for grads in GRADS:
        for name, p in theirs.items():
            p.grad = grads[name].clone()
        adamw.step()
    for name, (p, state, _) in ours.items():
        exact = name in ("narrow", "vector")  # whose moments are float32
        assert ("exp_avg_codes" in state) != exact
        torch.testing.assert_close(p, theirs[name].detach(), rtol=0, atol=1e-6 if exact else 3e-3)
    codes, scale = ours["wide"][1]["exp_avg_codes"], ours["wide"][1]["exp_avg_scale"]
    assert codes.dtype == torch.uint8
    assert codes.shape == (8, 4096)
    assert codes.unique().numel() > 100
    assert scale.shape == (8, 4096 // 256)


@pytest.mark.parametrize(("ranks", "tp"), [(3, 1), (16, 1), (2, 2), (8, 8)])
def test_every_layout_has_the_same_step(ranks: int, tp: int) -> None:
    _, whole = run(1, 0)
    for rank in range(ranks):
        for name, (p, state, box) in run(ranks, rank, tp)[1].items():
            full, everything, _ = whole[name]
            assert torch.equal(p, full[box]), name
            if "exp_avg_codes" in state:
                assert torch.equal(state["exp_avg_codes"], everything["exp_avg_codes"][box]), name


def test_gradients_are_scaled_and_a_step_may_be_skipped() -> None:
    (_, plain), (_, scaled) = run(1, 0), run(1, 0, scale=4.0, skip=True)
    for name in SHAPES:
        assert torch.equal(plain[name][0], scaled[name][0]), name
        assert plain[name][1]["step"] == scaled[name][1]["step"] == len(GRADS)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValidationError, match="`offload: all` is for `optimizer: adamw`, not for adamw8bit"):
        TrainConfig.model_validate({"optimizer": "adamw8bit", "offload": "all"})
    config = TrainConfig.model_validate({"optimizer": "adamw8bit"})
    assert shard_degree(config, Layout(tuple(range(24)), 1, 24), "actor.update") == 1
    with pytest.raises(ConfigError, match=r"train\.optimizer: adamw8bit scales blocks of rows, which tp 16 of actor"):
        shard_degree(config, Layout(tuple(range(16)), 1, 16), "actor.update")
