"""FSDP2 over the data-parallel dimensions of a mesh: wrapping, shards, and the norm of a sharded gradient.

A mesh is `dp` × `tp`; with hybrid sharding `dp` is `replicate` × `shard`.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from distflow.cpu import torch_threads
from distflow.model.tensor_parallel import REPLICATED
from distflow.weights.shards import TensorSpec

UNIT = 32 << 20  # bytes of parameters that are gathered together, at least


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the part of a mesh whose ranks have different samples, in one dimension or two."""
    return mesh["replicate", "shard"] if _hybrid(mesh) else mesh["dp"]


def sharding(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh dimension over which parameters are cut."""
    return mesh["shard"] if _hybrid(mesh) else mesh["dp"]


def _hybrid(mesh: DeviceMesh) -> bool:
    return "shard" in (mesh.mesh_dim_names or ())


def shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Wraps the model, some layers at a time; `root` is the module that is called."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for unit in units(model):
        fully_shard(unit, mesh=data_parallel(mesh), mp_policy=policy)
    fully_shard(root, mesh=data_parallel(mesh), mp_policy=policy, reshard_after_forward=False)


def units(model: PreTrainedModel) -> list[list[nn.Module]]:
    """Returns layers whose parameters are gathered together, at least UNIT bytes each.

    For a few small layers one exchange of everything is faster than an exchange for each, where workers would also wait
    for each other: such layers are left to the root.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[list[nn.Module]] = []
    room = 0
    for layer in (m for m in model.modules() if type(m).__name__ in names):
        if room <= 0:
            layers.append([])
            room = UNIT
        layers[-1].append(layer)
        room -= sum(p.numel() * p.element_size() for p in layer.parameters())
    return layers if len(layers) > 1 or room <= 0 else []


def local(p: Tensor) -> Tensor:
    """Returns this worker's shard of a parameter or gradient."""
    return p.to_local() if isinstance(p, DTensor) else p


def local_shards(parameters: Iterable[tuple[TensorSpec, Tensor]]) -> dict[str, Tensor]:
    return {spec.name: local(p.detach()) for spec, p in parameters}


def grad_norm(parameters: Iterable[tuple[TensorSpec, Tensor]], mesh: DeviceMesh) -> Tensor:
    """Returns the norm of the whole gradient, in float64, so that it hardly depends on the sharding."""
    # One sum for the parameters that tensor parallelism cuts, one for the others.
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
    with torch_threads(1):  # several would add up parts of their own
        for spec, p in parameters:
            if p.grad is not None:
                squares[int(spec.tp_dim is None)] += local(p.grad).double().square().sum()
    dist.all_reduce(squares, group=sharding(mesh).get_group())
    cut = squares[:1].clone()
    if mesh["tp"].size() > 1:
        dist.all_reduce(cut, group=mesh.get_group("tp"))
    return (cut[0] + squares[1]).sqrt()


def sum_replicated_grads(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Sums the gradients of whole weights that each tensor-parallel rank used for its own heads."""
    for name, style in styles.items():
        if style == REPLICATED and mesh["tp"].size() > 1:
            for p in model.get_submodule(name).parameters():
                if p.grad is not None:
                    dist.all_reduce(local(p.grad), group=mesh.get_group("tp"))
