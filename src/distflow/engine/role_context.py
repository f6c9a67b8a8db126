"""What an object that plays a role may ask for, by a parameter called `setup`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.config import Config
from distflow.plan.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from distflow.engine.model.source import Source


@dataclass(frozen=True)
class RoleContext:
    role: str
    rank: int
    config: Config
    steps: int  # of the run
    layouts: Mapping[str, Layout]  # method → where the role's node of that name runs
    meshes: Mapping[Layout, "DeviceMesh"]  # dimensions `dp` and `tp`
    groups: Mapping[Layout, "ProcessGroup"]  # all ranks of a layout
    device: "torch.device"
    source: "Source | None"  # the model to start from, if the config names one
