"""Stands for the other workers of a run, and for the device, as far as a worker would miss them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from distflow.comm import streams
from distflow.errors import DistflowError
from distflow.plan import Layout, Plan
from distflow.plan.communicators import MeshShape, communicators, sequence_groups, sequence_layouts
from distflow.rehearsal.allocations import Allocations
from distflow.rollout.builtin import engine
from distflow.train import offload

DEVICE = torch.device("meta")


class _Stream:
    """A stream or an event of a device that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> "_Stream":
        return self

    record = record_event = wait = wait_event = wait_stream = synchronize = _nothing


_MODULE = SimpleNamespace(
    Stream=_Stream,
    Event=_Stream,
    current_stream=_Stream,
    stream=lambda stream: nullcontext(),
    current_device=lambda: 0,
    set_device=lambda device: None,
    synchronize=lambda *device: None,
    empty_cache=lambda: None,
)


@contextmanager
def world_of(workers: int, rank: int) -> Iterator[Allocations]:
    """Makes this process one worker of many, whose collectives and device do nothing but need their memory."""
    if dist.is_initialized():
        raise DistflowError("memory is checked in a process that is not the worker of a run; start one for it")
    allocations = Allocations()
    with ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
            if "_get_device_handle" in vars(module):
                stack.enter_context(patch.object(module, "_get_device_handle", _device_module(module)))
        for target, name, value in _replaced(allocations):
            stack.enter_context(patch.object(target, name, value))
        dist.init_process_group("fake", rank=rank, world_size=workers, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield allocations


def _device_module(module: Any) -> Any:
    original = module._get_device_handle
    return lambda kind="cuda": _MODULE if kind == DEVICE.type else original(kind)


def _replaced(allocations: Allocations) -> Iterator[tuple[Any, str, Any]]:
    """Yields what refuses tensors without memory, or changes a storage without an operation that is seen."""
    group: Any = _fsdp_param_group.FSDPParamGroup
    yield group, "_validate_no_meta_params", lambda self: None
    yield _fsdp_param.FSDPParam, "reset_sharded_param", _reset
    yield _fsdp_init, "_move_states_to_device", lambda *states: None
    yield import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *tensor, **options: None
    yield torch, "get_device_module", lambda *device: _MODULE
    yield streams, "_WITHOUT", ("cpu",)
    yield engine, "check_kv_cache", lambda *cache: None
    for module, names in (
        (_fsdp_param, ("alloc_storage", "free_storage")),
        (_fsdp_param_group, ("alloc_storage",)),
        (offload, ("allocate", "free")),
    ):
        for name in names:
            if hasattr(module, name):
                yield module, name, _noted(getattr(module, name), allocations)


_reset_sharded_param: Any = _fsdp_param.FSDPParam.reset_sharded_param


def _reset(self: Any) -> None:
    """Does also for a shard without memory that FSDP uses the shard, which may have another dtype than the skeleton."""
    _reset_sharded_param(self)
    shard = self.sharded_param.to_local().detach()
    if self._sharded_param_data.numel() == shard.numel():  # no padding
        self._sharded_param_data = shard.flatten()
    else:
        self._sharded_param_data = self._sharded_param_data.to(shard.dtype)


def _noted(resize: Any, allocations: Allocations) -> Any:
    def call(tensor: Any, *size: Any) -> None:
        resize(tensor, *size)
        allocations.note(tensor)

    return call


def join(
    shapes: Sequence[MeshShape], plan: Plan, rank: int
) -> tuple[dict[MeshShape, DeviceMesh], dict[Layout, dist.ProcessGroup]]:
    """Makes the meshes and the groups of sequences that this rank is in."""
    order = communicators(shapes, [plan])
    groups = {
        c: dist.new_group(list(c.ranks), backend="fake", use_local_synchronization=True)
        for c in order
        if rank in c.ranks
    }
    meshes = {}
    for shape in (s for s in shapes if s.layout.replica_of(rank) is not None):
        own = [groups[c] for c in shape.communicators() if rank in c.ranks]
        ranks = torch.tensor(shape.layout.ranks).view(*shape.dims.values())
        meshes[shape] = DeviceMesh.from_group(own, DEVICE.type, ranks, mesh_dim_names=tuple(shape.dims))
    of_sequences = {
        layout: groups[c] for layout in sequence_layouts([plan]) for c in sequence_groups(layout) if rank in c.ranks
    }
    return meshes, of_sequences
