"""The built-in rollout engine: continuous batching on a Hugging Face model's own modules, on any device."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.config.schema import RolloutConfig
from distflow.model.memory import check_kv_cache
from distflow.model.source import Source, kv_bytes
from distflow.model.tensor_parallel import RowwiseAllReduce, parameter_specs, tp_styles
from distflow.plan.layout import Layout
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.builtin.weight_buffers import WeightBuffers
from distflow.rollout.engine import Completion, Request, Wake, never
from distflow.weights.shards import Shards, TensorSpec


class BuiltinEngine:
    """One rank's part of the engine; the ranks of a tensor-parallel replica generate together."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        mesh: DeviceMesh,
        rank: int,
        config: RolloutConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight_version = -1  # there are none yet
        model = source.skeleton()
        model.requires_grad_(False)
        model._apply(lambda t: t if t.is_meta else t.to(device))  # buffers
        styles = tp_styles(model, layout.tp, "placement.nodes.actor.generate")
        shards = Shards(layout, 1)
        self.weights = WeightBuffers(model, parameter_specs(model, styles), shards, rank, dtype, device)
        tp_group = mesh.get_group("tp") if layout.tp > 1 else None
        if tp_group is not None:
            RowwiseAllReduce(model, styles, tp_group)
        first = layout.replicas[layout.replica_of(rank) or 0][0]

        self._tp, self._wake, self._woken = tp_group is not None, never, False

        def agree(tokens: Tensor) -> Tensor:
            if tp_group is None:
                return tokens
            if self._wake is never:
                dist.broadcast(tokens, first, group=tp_group)
                return tokens
            # Whether to return early is agreed on with the same message.
            message = torch.cat((tokens, tokens.new_tensor([int(self._wake())])))
            dist.broadcast(message, first, group=tp_group)
            self._woken |= bool(message[-1])
            return message[:-1]

        cache_bytes = int(config.kv_cache_gb * (1 << 30))
        check_kv_cache(cache_bytes, device)
        limits = CacheLimits(kv_bytes(source.config, dtype, layout.tp), cache_bytes, config.max_sequences)
        # Tensor-parallel ranks meet in every layer, which they would do in different lanes. Lanes are not in step with
        # each other, so how far responses have come when others are complete would depend on time.
        alone = tp_group is not None or bool(config.partial)
        lanes = torch.get_num_threads() if not alone and device.type == "cpu" else 1
        self.generator = Generator(model, limits, device, agree, lanes)

    @property
    def weight_specs(self) -> Sequence[TensorSpec]:
        return self.weights.specs

    @property
    def adapter_specs(self) -> Sequence[TensorSpec]:
        return ()  # an adapter is merged

    def read_weights(self, source: Source) -> None:
        self.weights.read(source)

    def share_weights(self, tensors: Mapping[str, Tensor]) -> bool:
        if any(t.dtype != self.weights.dtype for t in tensors.values()):
            return False
        self.weights.use(tensors)
        return True

    def weight_targets(self) -> Mapping[str, Tensor]:
        self.weights.release()  # before there is new memory, unless that was done already
        return self.weights.allocate()

    def held_weights(self) -> Mapping[str, Tensor]:
        return {s.name: self.weights.model.get_parameter(s.name).detach() for s in self.weights.specs}

    def commit_weights(self, version: int) -> None:
        assert not self.has_unfinished
        self.weight_version = version

    def add_request(self, request: Request) -> None:
        self.generator.add_request(request)

    @property
    def has_unfinished(self) -> bool:
        return self.generator.has_unfinished

    def step(self, wake: Wake = never) -> list[Completion]:
        if not self._tp:
            return self.generator.step(self.weight_version, wake)
        self._wake, self._woken = wake, False
        return self.generator.step(self.weight_version, lambda: self._woken)

    def abort(self, request_ids: Iterable[int]) -> None:
        self.generator.abort(request_ids)

    def forget(self, sample_ids: Iterable[int]) -> None:
        self.generator.forget(sample_ids)

    def serving(self, sequences: int, longest: int) -> AbstractContextManager[None]:
        return self.generator.serving(sequences, longest)

    def interrupt(self) -> list[Completion]:
        return self.generator.interrupt(self.weight_version)

    def release_memory(self, weights: bool) -> None:
        if weights:
            self.weights.release()
        if self.weights.device.type != "cpu":  # where clearing the pages again would cost more than keeping them
            self.generator.caches = []
