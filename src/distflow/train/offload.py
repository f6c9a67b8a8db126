"""Keeps in host memory what nothing computes with for a while: moments of AdamW, shards of weights, activations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distflow.util.copies import to_host

_CHUNK = 1 << 30  # bytes of moments that are on the device at once
_LEAST = 1 << 20  # bytes of an activation that is worth a copy


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory between steps. They visit the device a part at a time, so that results are
    those of AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        device = groups[0]["params"][0].device
        try:
            for group in groups:
                for part in _parts(group["params"]):
                    self.param_groups = [{**group, "params": part}]
                    self._move(part, device)
                    super().step()
                    self._move(part, torch.device("cpu"))
        finally:
            self.param_groups = groups
        _wait(device)  # once a step: after it, the host may read the moments

    def _move(self, parameters: Sequence[Tensor], to: torch.device) -> None:
        for p in parameters:
            state = self.state.get(p, {})
            for key, tensor in state.items():
                if tensor.shape == p.shape and key != "step":
                    state[key] = to_host(tensor) if to.type == "cpu" else tensor.to(to, non_blocking=True)


class HostShards:
    """Shards of a device whose memory is freed while they are in host memory. They remain the same tensors, as FSDP and
    the optimiser hold them too."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = dict(shards)
        self._sizes = {name: t.untyped_storage().nbytes() for name, t in shards.items()}
        self.host = {name: to_host(t) for name, t in shards.items()}  # as they were when they were last away
        self._uses = 0
        self._device = next(iter(shards.values())).device
        self._leave()

    @contextmanager
    def on_device(self, changes: bool) -> Iterator[None]:
        """Has the shards on the device inside of it, and takes them back if it `changes` them."""
        if self._uses == 0:
            for name, shard in self._shards.items():
                allocate(shard, self._sizes[name])
                shard.copy_(self.host[name], non_blocking=True)
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
                if changes:
                    for name, shard in self._shards.items():
                        self.host[name].copy_(shard, non_blocking=True)
                self._leave()

    def _leave(self) -> None:
        _wait(self._device)
        for shard in self._shards.values():
            free(shard)

    def copies(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Returns shards by name, each of which comes to the device when it is looked up."""
        return _Lookup({name: self.host[name] for name in names}, self._device)


class HostActivations(saved_tensors_hooks):
    """Keeps in host memory what a forward pass inside of it saves for the backward pass, which brings it back when it
    is needed. With gradient checkpointing these are the inputs of the layers.

    Copies are in the order of the device's work, so nothing waits for them; weights are not among them.
    """

    def __init__(self) -> None:
        super().__init__(_to_host_if_large, _back)


def _to_host_if_large(saved: Tensor) -> tuple[Tensor, torch.device]:
    is_weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
    leaves = not (is_weight or saved.is_cpu or saved.nbytes < _LEAST)
    return (to_host(saved) if leaves else saved), saved.device


def _back(kept: tuple[Tensor, torch.device]) -> Tensor:
    tensor, device = kept
    return tensor.to(device, non_blocking=True)


class _Lookup(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device, non_blocking=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def allocate(tensor: Tensor, size: int) -> None:
    tensor.untyped_storage().resize_(size)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divides parameters so that both moments of each part have about _CHUNK bytes."""
    part: list[Tensor] = []
    size = 0
    for p in parameters:
        part.append(p)
        size += 2 * p.numel() * p.element_size()
        if size >= _CHUNK:
            yield part
            part, size = [], 0
    if part:
        yield part
