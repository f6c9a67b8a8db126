"""The actor's model where it is trained and where it generates, and the weight sync from one to the other."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distflow.comm.collectives import SendReceive
from distflow.comm.transport import report_lost_peers
from distflow.config.schema import LoraConfig, RolloutConfig
from distflow.model.source import DTYPES, Source
from distflow.model.text import Text, prompt_limit
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.rollout.builtin.engine import BuiltinEngine
from distflow.rollout.engine import RolloutEngine, SamplingParams
from distflow.rollout.vllm import engine as vllm
from distflow.rollout.vllm.support import check_vllm
from distflow.train.trainer import Trainer, make_trainer
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync import WeightSync
from distflow.weights.verify import WeightCheck


def check_engine(config: RolloutConfig, source: Source, device: torch.device, lora: LoraConfig | None) -> None:
    """Refuses a rollout engine that is not installed or does not know the model, before anything is loaded."""
    if config.engine == "vllm":
        check_vllm(source, device, lora)


class Policy:
    """Holds, on one rank, a trainer if the actor is trained (or gives log-probs) here, an engine if it generates."""

    def __init__(self, role: RoleContext) -> None:
        source, config = role.model, role.rollout
        self.role, self.dtype = role, DTYPES[role.train.dtype]
        self.text = Text(source, prompt_limit(source, config.max_tokens, role.max_prompt))
        trained = role.layout("update", "update_pairs", "logprobs", "ema_logprobs")
        generates = role.layout("generate", "converse")
        trainable = not {"update", "update_pairs"}.isdisjoint(role.layouts)
        lora = role.train.lora if trainable else None
        ema = role.train.ema if trainable else None
        here = generates is not None and role.rank in generates.ranks
        if here:
            check_engine(config, source, role.device, lora)
        self.trainer: Trainer | None = None
        if trained and role.rank in trained.ranks:
            self.trainer = make_trainer(role, source, trained, role.train, trainable, lora, ema)
        self.engine: RolloutEngine | None = self._make_engine(generates, lora) if generates and here else None
        self.keeps_weights = (
            config.staleness > 0 or config.chunk is not None
        )  # nobody trains here, and the next step may need the same ones
        self.sampling = SamplingParams(
            config.max_tokens,
            config.temperature,
            config.top_p,
            config.top_k,
            config.min_tokens,
            self.text.stop_tokens(source, config.stop),
        )
        self.lent = False  # to another role, which has it after us in every step
        self.weight_version = -1  # that the plan wants the engine to have
        self.transfer: WeightSync | None = None  # None: the engine has its weights already
        self.base_specs: Sequence[TensorSpec] = ()  # of the weights beside an adapter, if the engine has that apart
        self.base_transfer: WeightSync | None = None  # of these; None: done
        self.check: WeightCheck | None = None
        self._weight_syncs = 0
        if trained is None:
            if self.engine:
                self.engine.read_weights(source)
        elif generates:
            self._prepare_weight_sync(trained, generates)

    def _make_engine(self, layout: Layout, lora: LoraConfig | None) -> RolloutEngine:
        role, config, source = self.role, self.role.rollout, self.role.model
        if config.engine == "builtin":
            return BuiltinEngine(source, layout, role.meshes[layout], role.rank, config, self.dtype, role.device)
        longest = self.text.limit + config.max_tokens
        return vllm.VllmEngine(source, layout, role.rank, config, self.dtype, role.device, longest, lora)

    def _prepare_weight_sync(self, trained: Layout, generates: Layout) -> None:
        role = self.role
        source = Shards(trained, shard_degree(role.train, trained, role.name))
        base, adapter = self._specs()
        target = Shards(generates, 1, vllm.cut_rows(base, generates.tp) if role.rollout.engine == "vllm" else {})
        self.specs = adapter or base  # that every weight sync moves
        self.check = WeightCheck(source, target, role.rank, self.dtype)
        if adapter:
            self.base_specs = base
            self.base_transfer = WeightSync(base, source, target, role.rank, self.dtype, role.topology)
        if not self._shares_weights(trained == generates and source.shard == 1):
            self.transfer = WeightSync(self.specs, source, target, role.rank, self.dtype, role.topology)

    def _specs(self) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        """Returns the model's parameters, and those of an adapter that the engine has apart: the built-in merges it."""
        if self.trainer is None:
            assert self.engine is not None
            return self.engine.weight_specs, self.engine.adapter_specs
        apart = self.role.rollout.engine == "vllm" and self.trainer.adapter is not None
        return self.trainer.specs, self.trainer.adapter.specs if apart and self.trainer.adapter else ()

    def _shares_weights(self, whole: bool) -> bool:
        """Whether the engine uses the trainer's own tensors, which it can if this rank has `whole` weights of both."""
        if not (whole and self.engine and self.trainer) or self.trainer.adapter:
            return False
        return self.engine.share_weights(self.trainer.weights())

    def sync_weights(self, version: int, weights: Mapping[str, Tensor] | None = None) -> Iterator[SendReceive]:
        """Moves weights to the engines; all ranks that train or generate take part.

        `version`: how many steps have trained them. `weights`: a copy of this rank's part, if it was trained further.
        """
        self.weight_version = version
        if self.check:
            yield from self.check.agree(version)
            if self.base_transfer:
                yield from self._move(self.base_transfer, self.base_specs, self._base_weights())
                self.base_transfer = None  # nothing changes it
            yield from self._move(self.transfer, self.specs, self._weights() if weights is None else weights)
        if self.engine:
            self.engine.commit_weights(version)
        self._weight_syncs += 1

    def copy_weights(self) -> Mapping[str, Tensor]:
        """Returns a copy of this rank's part of what every weight sync moves."""
        return {name: tensor.clone() for name, tensor in self._weights().items()}

    def _move(
        self, transfer: WeightSync | None, specs: Sequence[TensorSpec], given: Mapping[str, Tensor]
    ) -> Iterator[SendReceive]:
        """Hands parameters over, and compares the engine's with those that were given, every few times."""
        assert self.check is not None
        if transfer:
            yield from transfer.run(given, self.engine.weight_targets() if self.engine else {})
        every = self.role.rollout.verify_every
        if every and self._weight_syncs % every == 0:
            held = self.engine.held_weights() if self.engine else {}
            yield from self.check.compare(specs, given, held, self.weight_version)

    def _weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's part of what every weight sync moves."""
        if self.trainer is None:
            return {}
        with report_lost_peers(self.trainer.layout.ranks):
            return self.trainer.adapter_weights() if self.base_specs else self.trainer.weights()

    def _base_weights(self) -> Mapping[str, Tensor]:
        return self.trainer.base_weights() if self.trainer else {}

    def release_engine_memory(self) -> None:
        """Gives back the KV cache and the weights that the next weight sync fills again: training needs the memory."""
        if self.engine and not self.lent:
            self._release(self.engine)

    def lend_engine(self) -> RolloutEngine:
        """Lets another role of this rank generate with the weights of each step, after us; it says when it is done."""
        assert self.engine is not None
        self.lent = True
        return self.engine

    def return_engine(self) -> None:
        """Is called by that role once it has generated: now memory is given back."""
        assert self.engine is not None
        self._release(self.engine)

    def longest_prompt(self, max_tokens: int) -> int:
        """Returns how many tokens a prompt may have that the engine answers with `max_tokens`."""
        limit = prompt_limit(self.role.model, max_tokens, None)
        return min(limit, self.engine.longest - max_tokens) if isinstance(self.engine, vllm.VllmEngine) else limit

    def _release(self, engine: RolloutEngine) -> None:
        weights = self.transfer is not None and not self.base_specs and not self.keeps_weights
        engine.release_memory(weights=weights)
