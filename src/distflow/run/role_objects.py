"""The objects of the roles that a rank's chains use, and the device meshes that they ask for."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distflow.config import Config
from distflow.plan import Layout, Plan, RunNode, SyncWeights
from distflow.plan.communicators import MeshShape
from distflow.plan.topology import Topology
from distflow.roles.context import RoleContext
from distflow.roles.role import Role
from distflow.run.program import Program

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from distflow.model.images import Images
    from distflow.model.source import Source


@dataclass(frozen=True)
class RankContext:
    """The values that the roles of one rank share."""

    rank: int
    meshes: "Mapping[MeshShape, DeviceMesh]"
    sequence_groups: "Mapping[Layout, ProcessGroup]"
    topology: Topology
    device: "torch.device"
    source: "Source | None"  # the model to start from, if the config names one
    images: "Images | None"  # of the prompts, if the model reads images
    steps: int  # of the run


def make_roles(
    program: Program, config: Config, plans: list[Plan], of: RankContext, models_only: bool = False
) -> dict[str, Role]:
    """Makes the roles of a rank, in an order that all ranks share: they may create process groups for them.

    `config`: the program's, with what was chosen for the device. `models_only`: only roles that ask for a RoleContext.
    """
    roles: dict[str, Role] = {}
    generates = {n.role: p.partition_of(n.id).layout for p in plans for n in p.flow.nodes if n.generates}
    for name in sorted(_roles(plans, of.rank), key=lambda role: (role not in generates, role)):  # engines come first
        implementation, args = program.role_class(name), dict(program.role_bindings[name].args)
        if models_only and not _takes_role_context(implementation):
            continue
        if _takes_role_context(implementation):
            args["role"] = RoleContext(
                name=name,
                rank=of.rank,
                layouts=_layouts(plans, name),
                meshes=of.meshes,
                sequence_groups=of.sequence_groups,
                topology=of.topology,
                device=of.device,
                source=of.source,
                rollout=config.rollout,
                train=config.train,
                critic=config.critic,
                max_prompt=config.data.max_prompt,
                rendered=config.data.rendered,
                chat_template_kwargs=config.data.chat_template_kwargs,
                steps=of.steps,
                seed=config.seed,
                base=config.base,
                generates=generates,
                only_generates=only_generates(plans, of.rank),
                images=of.images,
                roles=roles,
            )
        roles[name] = implementation(**args)
    return roles


def only_generates(plans: Sequence[Plan], rank: int) -> bool:
    """Returns whether a rank computes with models only to generate."""
    nodes = [p.flow.node(t.node) for p in plans for t in p.chain(rank) if isinstance(t, RunNode)]
    return all(n.generates or n.type == "compute" for n in nodes)


def _roles(plans: list[Plan], rank: int) -> list[str]:
    """Returns the roles of whose objects this rank's chains call a method, or move the weights."""
    roles: dict[str, None] = {}
    for plan in plans:
        for t in plan.chain(rank):
            if isinstance(t, SyncWeights):
                roles[t.role] = None
            elif isinstance(t, RunNode) and plan.flow.node(t.node).method:
                roles[plan.flow.node(t.node).role] = None
    return list(roles)


def _layouts(plans: list[Plan], role: str) -> dict[str, Layout]:
    """Returns method → layout of the role's node of that name."""
    return {
        n.call.rpartition(".")[2]: p.partition_of(n.id).layout
        for p in plans
        for n in p.flow.nodes
        if n.role == role and n.method
    }


def mesh_shapes(program: Program, plans: list[Plan]) -> list[MeshShape]:
    """Returns the meshes of the roles that ask for a RoleContext; two for a layout with hybrid sharding."""
    roles = {n.role for p in plans for n in p.flow.nodes if n.method}
    shapes: dict[MeshShape, None] = {}
    for role in (r for r in sorted(roles) if _takes_role_context(program.implementation(r))):
        config = program.config.critic if role == "critic" else program.config.train
        generates = {n.call.rpartition(".")[2] for p in plans for n in p.flow.nodes if n.role == role and n.generates}
        for method, layout in _layouts(plans, role).items():
            of_weights = layout.without_sp
            shapes[MeshShape(of_weights)] = None
            degree = config.shard_degree or of_weights.dp
            if degree != of_weights.dp and of_weights.dp % degree == 0 and method not in generates:
                shapes[MeshShape(of_weights, degree)] = None
    return list(shapes)


def _takes_role_context(implementation: Any) -> bool:
    return "role" in inspect.signature(implementation).parameters
