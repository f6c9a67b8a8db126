"""What an object that implements a role may ask for, by a parameter called `role`. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.config.schema import CriticConfig, RolloutConfig, TrainConfig
from distflow.errors import ConfigError
from distflow.plan.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from distflow.engine.model.source import Source


@dataclass(frozen=True)
class RoleContext:
    """A role's place in the run, and the sections of the config that engines need."""

    name: str
    rank: int
    layouts: Mapping[str, Layout]  # method → where the role's node of that name runs
    meshes: Mapping[Layout, "DeviceMesh"]  # dimensions `dp` and `tp`
    device: "torch.device"
    source: "Source | None"  # the model to start from, if the config names one
    rollout: RolloutConfig
    train: TrainConfig
    critic: CriticConfig
    max_prompt: int | None  # tokens, as in data.max_prompt
    steps: int  # of the run
    seed: int
    base: Path  # folder of the config; losses and models are looked up from here

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
