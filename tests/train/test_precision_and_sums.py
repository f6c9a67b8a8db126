"""What is held in which precision, and how often replicas of a model sum their gradients."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelerator.scenarios import Case, update
from distflow.config.schema import LoraConfig, TrainConfig
from distflow.plan import Layout
from distflow.train.trainer import RankMesh, Trainer, TrainerOptions
from spawn import spawn

CASE = Case("qwen2", dtype="bfloat16")


def dtypes(rank: int) -> dict[str, set[torch.dtype]]:
    """Returns the dtypes of the parameters of models that are trained, run, and adapted."""
    options = TrainerOptions(TrainConfig(dtype="bfloat16"))
    kinds = {
        "trained": options,
        "run": replace(options, trainable=False),
        "adapted": replace(options, lora=LoraConfig(rank=2)),
    }
    place = RankMesh(CASE.layout, CASE.mesh("cpu"), rank)
    made = {name: Trainer("actor", CASE.source, place, of).model.named_parameters() for name, of in kinds.items()}
    found = {name: {p.dtype for _, p in parameters} for name, parameters in made.items() if name != "adapted"}
    adapted = list(made["adapted"])
    found["adapter"] = {p.dtype for name, p in adapted if "lora" in name}
    found["base"] = {p.dtype for name, p in adapted if "lora" not in name}
    return found


def test_only_what_is_trained_is_held_in_float32() -> None:
    (found,) = spawn(1, dtypes)
    assert found == {
        "trained": {torch.float32},
        "run": {torch.bfloat16},
        "adapter": {torch.float32},
        "base": {torch.bfloat16},
    }


def sums(rank: int, micro_tokens: int) -> tuple[int, int]:
    """Returns how often something is summed over replicas in two updates, and in how many micro-batches."""
    layout = Layout((0, 1), 2)
    mesh = DeviceMesh("cpu", torch.arange(2).view(2, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
    config = TrainConfig(lr=1e-2, micro_tokens=micro_tokens, shard_degree=1)
    trainer = Trainer("actor", CASE.source, RankMesh(layout, mesh, rank), TrainerOptions(config))
    micro_batches = 0

    def count(*_: Any) -> None:
        nonlocal micro_batches
        micro_batches += 1

    trainer.model.register_forward_pre_hook(count)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        update(trainer, rank, Case("qwen2", dp=2))
    return summed.call_count, micro_batches


def test_replicas_sum_their_gradients_once_per_update() -> None:
    ((few, one), _), ((many, several), _) = (spawn(2, sums, tokens) for tokens in (1000, 12))
    assert several >= 2 * one
    assert many == few > 0
