"""What an object that implements a role may ask for, by a parameter called `role`. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.schema import CriticConfig, RolloutConfig, TrainConfig, TrainerConfig
from distflow.errors import ConfigError
from distflow.plan.layout import Layout
from distflow.plan.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from distflow.model.source import Source


@dataclass(frozen=True)
class RoleContext:
    """A role's place in the run, and the sections of the config that engines need."""

    name: str
    rank: int
    layouts: Mapping[str, Layout]  # method → where the role's node of that name runs
    meshes: Mapping[Layout, "DeviceMesh"]  # dimensions `dp` and `tp`
    hybrid_mesh: Callable[[Layout, int], "DeviceMesh"]  # `replicate`, `shard` and `tp`, for this many shards
    topology: Topology
    device: "torch.device"
    source: "Source | None"  # the model to start from, if the config names one
    rollout: RolloutConfig
    train: TrainConfig
    critic: CriticConfig
    max_prompt: int | None  # tokens, as in data.max_prompt
    rendered: bool  # as in data.rendered
    steps: int  # of the run
    seed: int
    base: Path  # folder of the config; losses and models are looked up from here
    generates: Mapping[str, Layout] = field(default_factory=dict)  # role with an engine → where it generates
    roles: Mapping[str, Any] = field(default_factory=dict)  # this rank's objects of them, which are made first

    @property
    def model(self) -> "Source":
        """The model to start from, for a role that cannot do without one."""
        if self.source is None:
            raise ConfigError(f"role '{self.name}' needs a model; say which: `model: name-or-directory`")
        return self.source

    def layout(self, *methods: str) -> Layout | None:
        """The one layout of these methods, which share a model; None if the flow calls none of them."""
        layouts = {m: self.layouts[m] for m in methods if m in self.layouts}
        if len(set(layouts.values())) > 1:
            listed = ", ".join(f"{self.name}.{m} on {layout}" for m, layout in layouts.items())
            raise ConfigError(f"placement: {listed} share one model; place them alike")
        return next(iter(layouts.values()), None)


def shard_degree(config: TrainerConfig, layout: Layout, user: str) -> int:
    """Returns over how many dp ranks of a layout, that of `user`, parameters are sharded."""
    degree = layout.dp if config.shard_degree is None else config.shard_degree
    if layout.dp % degree:
        key = "critic" if isinstance(config, CriticConfig) else "train"
        fits = ", ".join(str(n) for n in range(1, layout.dp + 1) if layout.dp % n == 0)
        raise ConfigError(
            f"{key}.shard_degree: {degree} does not divide dp {layout.dp} of {user}; use one of {fits}, or leave it out"
        )
    return degree
