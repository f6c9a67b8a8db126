"""The actor's model where it is trained and where it generates, and the weight sync from one to the other."""

import logging
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from distflow.comm.collectives import SendReceive
from distflow.comm.transport import report_lost_peers
from distflow.config.schema import MIXTURES, LoraConfig, RolloutConfig
from distflow.device.offer import release_cached
from distflow.errors import ConfigError
from distflow.model.memory import kv_budget
from distflow.model.source import DTYPES, Source, kv_bytes
from distflow.model.text import Text, prompt_limit
from distflow.plan.layout import Layout
from distflow.roles.context import RoleContext, shard_degree
from distflow.rollout.engine import EngineSetup, RolloutEngine, SamplingParams, load_engine
from distflow.train.trainer import Trainer, TrainerOptions, make_trainer
from distflow.weights.shards import Shards, TensorSpec
from distflow.weights.sync import WeightSync
from distflow.weights.verify import WeightCheck

logger = logging.getLogger(__name__)

_Move = tuple[WeightSync | None, Sequence[TensorSpec], Mapping[str, Tensor]]  # a transfer, of which tensors, and these


def check_router_replay(source: Source, config: RolloutConfig) -> None:
    """Raises if experts are to be replayed of a model, or by an engine, that has none to give."""
    if not config.router_replay:
        return
    if source.config.get_text_config().model_type not in MIXTURES:
        raise ConfigError(
            f"rollout.router_replay: '{source.name}' is a {source.config.model_type} model, and experts are"
            f" replayed for {' and '.join(MIXTURES)}; leave it out"
        )
    if not load_engine(config.engine).returns_experts:
        raise ConfigError(
            f"rollout.router_replay: the engine '{config.engine}' does not return the experts that it has chosen; use"
            " `engine: builtin`, or leave it out"
        )


class Policy:
    """Holds, on one rank, a trainer if the actor is trained (or gives log-probs) here, an engine if it generates."""

    def __init__(self, role: RoleContext) -> None:
        source, config = role.model, role.rollout
        self.role, self.dtype = role, DTYPES[role.train.dtype]
        limit = prompt_limit(source, config.max_tokens, role.max_prompt)
        self.text = Text(source, limit, role.rendered, role.chat_template_kwargs, role.images)
        trained = role.layout("update", "update_pairs", "logprobs", "ema_logprobs", "ema_top_logprobs", "entropy")
        generates = role.layout("generate", "converse")
        trainable = not {"update", "update_pairs"}.isdisjoint(role.layouts)
        lora = role.train.lora if trainable else None
        ema, freeze = (role.train.ema, role.train.freeze) if trainable else (None, [])
        here = generates is not None and role.rank in generates.ranks
        self.engine_kind = load_engine(config.engine)
        check_router_replay(source, config)
        if here:
            self.engine_kind.check(source, config, role.device, lora)
        self.trainer: Trainer | None = None
        if trained and role.rank in trained.ranks:
            self.trainer = make_trainer(
                role,
                source,
                trained,
                TrainerOptions(
                    role.train,
                    trainable,
                    lora,
                    freeze,
                    ema,
                    role.train.ema_every,
                    router_aux_loss=role.train.router_aux_loss,
                ),
            )
        self.engine: RolloutEngine | None = self._make_engine(generates, lora) if generates and here else None
        self.keeps_weights = (
            config.staleness > 0 or config.chunk is not None
        )  # this rank does not train, and the next step may need the same ones
        self.sampling = SamplingParams(
            config.max_tokens,
            config.temperature,
            config.top_p,
            config.top_k,
            config.min_p,
            config.repetition_penalty,
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
        role, config = self.role, self.role.rollout
        longest, mesh = self.text.limit + config.max_tokens, role.mesh(layout)
        where = layout, mesh, role.rank
        size, per_token = int(config.kv_cache_gb * (1 << 30)), kv_bytes(role.model.config, self.dtype, layout.tp)
        if role.rank == layout.ranks[0] and size < longest * per_token * config.max_sequences:
            logger.info("KV cache of a worker: %s", kv_budget(size, per_token, longest, config.max_sequences))
        setup = EngineSetup(role.model, *where, config, self.dtype, role.device, longest, lora, role.images)
        return self.engine_kind(setup)

    def _prepare_weight_sync(self, trained: Layout, generates: Layout) -> None:
        role = self.role
        source = Shards(trained.without_sp, shard_degree(role.train, trained, role.name))
        base, adapter = self._specs()
        target = self.engine_kind.shards(base, generates)
        self.specs = adapter or base  # that every weight sync moves
        how = role.rank, self.dtype, role.topology, role.device
        self.check = WeightCheck(source, target, role.rank, self.dtype)
        if adapter:
            self.base_specs = base
            self.base_transfer = WeightSync(base, source, target, *how)
        if not self._shares_weights(source.layout == generates and source.shard == 1):
            self.transfer = WeightSync(self.specs, source, target, *how)

    def _specs(self) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
        """Returns the model's parameters, and those of an adapter that the engine keeps apart from them."""
        if self.trainer is None:
            assert self.engine is not None
            return self.engine.weight_specs, self.engine.adapter_specs
        adapter = self.trainer.adapter if self.engine_kind.keeps_adapter else None
        return self.trainer.specs, adapter.specs if adapter else ()

    def _shares_weights(self, whole: bool) -> bool:
        """Returns whether the engine uses the trainer's tensors: it can if this rank has `whole` weights of both."""
        if not (whole and self.engine and self.trainer) or self.trainer.adapter or self.trainer.host:
            return False
        return self.engine.share_weights(self.trainer.weights())

    def sync_weights(self, version: int, weights: Mapping[str, Tensor] | None = None) -> Iterator[SendReceive]:
        """Moves weights to the engines, and compares the engines' with these every few times.

        All ranks that train or generate take part. `version`: how many steps have trained the weights. `weights`: a
        copy of this rank's part, if it was trained further.
        """
        self.weight_version = version
        release_cached(self.role.device)
        if self.check:
            yield from self.check.agree(version)
            for transfer, specs, given in self._moves(weights):
                if transfer:
                    yield from transfer.run(given, self.engine.weight_targets() if self.engine else {})
                every = self.role.rollout.verify_every
                if every and self._weight_syncs % every == 0:
                    held = self.engine.held_weights() if self.engine else {}
                    yield from self.check.compare(specs, given, held, version)
            self.base_transfer = None  # nothing changes these weights
        if self.engine:
            self.engine.commit_weights(version)
        self._weight_syncs += 1

    def copy_weights(self) -> Mapping[str, Tensor]:
        """Returns a copy of this rank's part of what every weight sync moves."""
        return {name: tensor.clone() for name, tensor in self._weights().items()}

    def _moves(self, weights: Mapping[str, Tensor] | None) -> Iterator[_Move]:
        """Yields what this weight sync moves: once, what an adapter is added to, then what is trained."""
        if self.base_transfer:
            yield self.base_transfer, self.base_specs, self._base_weights()
        yield self.transfer, self.specs, self._weights() if weights is None else weights

    def _weights(self) -> Mapping[str, Tensor]:
        """Returns this rank's part of what every weight sync moves."""
        if self.trainer is None:
            return {}
        with report_lost_peers(self.trainer.layout.ranks):
            return self.trainer.adapter_weights() if self.base_specs else self.trainer.weights()

    def _base_weights(self) -> Mapping[str, Tensor]:
        return self.trainer.base_weights() if self.trainer else {}

    def release_engine_memory(self) -> None:
        """Gives back the KV cache and the weights that the next weight sync fills again, if others need the memory."""
        if self.engine and not self.lent:
            self._release(self.engine)

    def lend_engine(self) -> RolloutEngine:
        """Lets another role of this rank generate with the weights of each step, after us; it says when it is done."""
        assert self.engine is not None
        self.lent = True
        return self.engine

    def return_engine(self) -> None:
        """Takes the engine back from that role once it has generated: now memory is given back."""
        assert self.engine is not None
        self._release(self.engine)

    def longest_prompt(self, max_tokens: int) -> int:
        """Returns how many tokens a prompt may have that the engine answers with `max_tokens`."""
        assert self.engine is not None
        return min(prompt_limit(self.role.model, max_tokens, None), self.engine.longest - max_tokens)

    def _release(self, engine: RolloutEngine) -> None:
        if self.role.only_generates:
            return
        weights = self.transfer is not None and not self.base_specs and not self.keeps_weights
        engine.release_memory(weights=weights)
        release_cached(self.role.device)
