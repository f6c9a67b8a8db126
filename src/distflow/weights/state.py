"""The state of a role, as checkpoints see it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow.errors import CheckpointError, shown
from distflow.weights.shards import Box, Shards, TensorSpec

WEIGHTS, EMA = "weights.", "ema."  # prefixes of the names of a model's parameters, and of their moving averages


@dataclass(frozen=True)
class RoleState:
    """Small values that all workers of a role have in common, and tensors, of which a worker may have a part each."""

    values: Any  # plain JSON
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # this worker's parts; whole where there is no spec
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the tensors that are cut as `shards` says
    shards: Shards | None = None
    describe: Callable[[Path], None] = lambda folder: None  # writes what else it takes to use the tensors

    @classmethod
    def of(cls, state: Any, role: str) -> "RoleState":
        """Makes it from what `Role.state` returns: a `RoleState`, or plain JSON, and in a dict also whole tensors."""
        if isinstance(state, RoleState):
            return state
        if not isinstance(state, Mapping):
            return cls(state)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if not isinstance(name, str) or isinstance(tensor, DTensor):
                raise CheckpointError(
                    f"role '{role}': state() returns a tensor {shown(name)} that is sharded or has no name; gather it"
                )
        return cls({name: value for name, value in state.items() if name not in tensors}, tensors)

    def box(self, name: str, rank: int) -> Box:
        """Returns the part of a tensor that this rank has."""
        if self.shards is None or name not in self.specs:
            return tuple((0, n) for n in self.tensors[name].shape)
        return self.shards.box(self.specs[name], rank)
