"""The built-in rollout engine: continuous batching on a Hugging Face model's own modules, on any device."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.cpu.modules import use_cpu_modules
from distflow.model.memory import check_kv_cache
from distflow.model.source import kv_bytes
from distflow.model.tensor_parallel import RowwiseAllReduce, parameter_specs, tp_styles
from distflow.rollout.builtin.generator import CacheLimits, Generator
from distflow.rollout.builtin.weight_buffers import WeightBuffers
from distflow.rollout.engine import Completion, EngineSetup, RolloutEngine, Wake, never


class BuiltinEngine(Generator, RolloutEngine):
    """A generator, and the weights that it generates with. Tensor-parallel ranks of a replica generate together."""

    returns_experts = True

    def __init__(self, setup: EngineSetup) -> None:
        layout, device, config = setup.layout, setup.device, setup.config
        model = setup.source.skeleton()
        model.requires_grad_(False)
        if device.type == "cpu":
            use_cpu_modules(model)  # as the trainer does
        model._apply(lambda t: t if t.is_meta else t.to(device))  # buffers
        styles = tp_styles(model, layout.tp, "placement.nodes.actor.generate")
        tp_group = setup.mesh.get_group("tp") if layout.tp > 1 else None
        if tp_group is not None:
            RowwiseAllReduce(model, styles, tp_group)
        first = layout.replicas[layout.replica_of(setup.rank) or 0][0]
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
        limits = CacheLimits(kv_bytes(setup.source.config, setup.dtype, layout.tp), cache_bytes, config.max_sequences)
        # Tensor-parallel ranks meet in every layer, which they would do in different batches. Batches in threads are
        # not in step, so how far responses have come when others are complete would depend on time. What routers have
        # chosen is found at the model's modules, which threads share.
        alone = tp_group is not None or bool(config.partial) or config.router_replay
        Generator.__init__(
            self,
            model,
            limits,
            device,
            agree,
            max_batches=torch.get_num_threads() if not alone and device.type == "cpu" else 1,
            keeps_experts=config.router_replay,
            images=setup.images,
            graphs=config.graphs and tp_group is None,  # whose ranks meet in every layer
        )
        self.setup, self.weight_version, self.longest = setup, -1, min(setup.longest, limits.longest)
        self.weight_specs = parameter_specs(model, styles)
        shards = self.shards(self.weight_specs, layout)
        self.weights = WeightBuffers(model, self.weight_specs, shards, setup.rank, setup.dtype, device)

    def share_weights(self, tensors: Mapping[str, Tensor]) -> bool:
        if any(t.dtype != self.weights.dtype for t in tensors.values()):
            return False
        self.weights.use(tensors)
        return True

    def weight_targets(self) -> Mapping[str, Tensor]:
        self.weights.release()  # before there is new memory, unless that was done already
        return self.weights.allocate()

    def held_weights(self) -> Mapping[str, Tensor]:
        return {s.name: self.model.get_parameter(s.name).detach() for s in self.weight_specs}

    def commit_weights(self, version: int) -> None:
        assert not self.has_unfinished
        super().commit_weights(version)

    def step(self, wake: Wake = never) -> list[Completion]:
        if not self._tp:
            return super().step(wake)
        self._wake, self._woken = wake, False
        return super().step(lambda: self._woken)

    def release_memory(self, weights: bool) -> None:
        if weights:
            self.weights.release()
        if self.device.type != "cpu":  # where clearing the pages again would cost more than keeping them
            self.caches = []
