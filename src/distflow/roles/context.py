"""The context that an implementation of a role may ask for, by a parameter called `role`. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.schema import MOST_CUTS_8BIT, CriticConfig, RolloutConfig, TrainConfig, TrainerConfig
from distflow.errors import ConfigError
from distflow.plan.communicators import MeshShape
from distflow.plan.layout import Layout
from distflow.plan.topology import Topology

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from distflow.model.images import Images
    from distflow.model.source import Source


@dataclass(frozen=True)
class RoleContext:
    """A role's place in the run, and the sections of the config that engines need."""

    name: str
    rank: int
    layouts: Mapping[str, Layout]  # method → where the role's node of that name runs
    meshes: Mapping[MeshShape, "DeviceMesh"]
    topology: Topology
    device: "torch.device"
    source: "Source | None"  # the model to start from, if the config names one
    rollout: RolloutConfig
    train: TrainConfig
    critic: CriticConfig
    max_prompt: int | None  # tokens, as in data.max_prompt
    rendered: bool  # as in data.rendered
    chat_template_kwargs: Mapping[str, Any]  # as in data.chat_template_kwargs
    steps: int  # of the run
    seed: int
    base: Path  # folder of the config; losses and models are looked up from here
    generates: Mapping[str, Layout] = field(default_factory=dict)  # role with an engine → where it generates
    images: "Images | None" = None  # of the prompts, if the model reads images
    sequence_groups: Mapping[Layout, "ProcessGroup"] = field(
        default_factory=dict
    )  # layout → ranks that share sequences
    only_generates: bool = False  # this rank computes nothing else with a model, so all memory is the engine's
    roles: Mapping[str, Any] = field(default_factory=dict)  # this rank's objects of them, which are made first

    @property
    def model(self) -> "Source":
        """Returns the model to start from, for a role that cannot do without one."""
        if self.source is None:
            raise ConfigError(f"role '{self.name}' needs a model; say which: `model: name-or-directory`")
        return self.source

    def mesh(self, layout: Layout, shard: int | None = None) -> "DeviceMesh":
        """Returns the mesh `dp` × `tp` of a layout that this rank is in; with `shard`, `replicate` × `shard` × `tp`.

        Its `dp` is dp × sp of the layout.
        """
        return self.meshes[MeshShape(layout.without_sp, shard)]

    def layout(self, *methods: str) -> Layout | None:
        """Returns the one layout of these methods, which share a model; None if the flow calls none of them."""
        layouts = {m: self.layouts[m] for m in methods if m in self.layouts}
        if len(set(layouts.values())) > 1:
            listed = ", ".join(f"{self.name}.{m} on {layout}" for m, layout in layouts.items())
            raise ConfigError(f"placement: {listed} share one model; place them alike")
        return next(iter(layouts.values()), None)


def shard_degree(config: TrainerConfig, layout: Layout, user: str) -> int:
    """Returns over how many dp × sp ranks of a layout, that of `user`, parameters are sharded."""
    ranks, key = layout.without_sp.dp, "critic" if isinstance(config, CriticConfig) else "train"
    degree = ranks if config.shard_degree is None else config.shard_degree
    if config.optimizer == "adamw8bit" and layout.tp & -layout.tp > MOST_CUTS_8BIT:  # its factor of two
        raise ConfigError(
            f"{key}.optimizer: adamw8bit scales blocks of rows, which tp {layout.tp} of {user} would cut; use tp"
            f" {MOST_CUTS_8BIT}, or another optimizer"
        )
    if ranks % degree:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        of = f"dp {layout.dp}" + (f" × sp {layout.sp}" if layout.sp > 1 else "")
        raise ConfigError(
            f"{key}.shard_degree: {degree} does not divide {of} of {user}; use one of {fits}, or leave it out"
        )
    return degree
