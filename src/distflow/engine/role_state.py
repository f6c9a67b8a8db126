"""What a role with a model keeps in a checkpoint, as checkpoints see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

WEIGHTS = "weights."  # prefix of the names of a model's parameters
LoadTensors = Callable[[Mapping[str, Tensor]], None]  # fills these tensors, or this rank's shards of them


@dataclass(frozen=True)
class RoleState:
    """This worker's shards of a role's tensors, and small values that all of its workers have in common."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    describe: Callable[[Path], None] = lambda folder: None  # writes what else it takes to use the tensors


def shard_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Wraps `local` as this worker's shard of another tensor that is sharded like `tensor`."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
