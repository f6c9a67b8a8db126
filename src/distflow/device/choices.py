"""Chooses for an accelerator what must differ from a CPU, for which the defaults of the config are. Imports no torch.

A value from the user wins. Every choice has its reason, which `distflow check` and the log of a run show.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distflow.config import Config
from distflow.config.model_shape import ModelShape
from distflow.config.schema import Offload, PlaceConfig, TrainerConfig
from distflow.device.footprint import FITS, PROMPT, ROLLOUT, Engine, Phase, Settings, phases_of
from distflow.device.process import DEVICE_START_LIMIT_S, ProcessSettings, sets_allocator
from distflow.errors import ConfigError
from distflow.plan.field_bytes import PROMPT_TOKENS
from distflow.plan.tasks import Plan
from distflow.util.text import human_bytes

if TYPE_CHECKING:
    from distflow.device.offer import Offer

GIB = 1 << 30
_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")
_SEQUENCES = 1024  # generated at the same time: more hardly make decoding faster
_LEAST_CACHE = 4.0  # GiB of KV cache below which state of the trainer is moved to make room
_LEAST_SEQUENCES = 64  # that a replica of the engine should have room for: with fewer it reads the weights for little
_PER_HOST = 8  # ranks of a replica of the engine, at most: they talk in every layer


@dataclass(frozen=True)
class Choice:
    """A key of the config that was not set, the value that it has, and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.value)} ({self.reason})"


@dataclass(frozen=True)
class Chosen:
    """A config whose keys have the values for a device."""

    config: Config
    choices: tuple[Choice, ...] = ()
    phases: tuple[Phase, ...] = ()  # of the rank that needs most
    process: ProcessSettings = field(default_factory=ProcessSettings)


def choose(
    config: Config,
    offer: "Offer | None",
    plan: Plan,
    models: Mapping[str, ModelShape],
    vllm: Callable[[], str],
) -> Chosen:
    """Returns the config for what the device offers; `models` by role; `vllm` says why vLLM cannot be used, or ""."""
    if offer is None or not models:
        if offer is None and config.rollout.gpu_memory_utilization is not None:
            raise ConfigError(
                "rollout.gpu_memory_utilization: there is no accelerator here; on a CPU, give rollout.kv_cache_gb"
            )
        return Chosen(config)
    return _Chooser(config, offer, plan, models, vllm).run()


def choose_tp(
    config: Config, offer: "Offer | None", plan_of: Callable[[Config], Plan], models: Mapping[str, ModelShape]
) -> tuple[Config, tuple[Choice, ...]]:
    """Returns the config with as much tensor parallelism of generation as its weights and caches need to fit, where the
    config leaves that open. It decides the plan, so all workers have to ask with the same `offer`."""
    if offer is None or not offer.memory:
        return config, ()
    choices = []
    for node in (n for n in plan_of(config).flow.nodes if n.generates and n.method and n.role in models):
        places = config.placement
        place = places.nodes.get(node.id) or places.roles.get(node.role) or places.default
        if {"tp", "dp"} & place.model_fields_set:
            continue
        ranks, shape = len(plan_of(config).partition_of(node.id).layout.ranks), models[node.role]
        tried: dict[int, tuple[int, Config]] = {}  # tp that has room → what is moved away, config
        for tp in (t for t in range(1, _PER_HOST + 1) if _divides(t, ranks, shape)):
            given = _with_tp(config, node.id, place, tp)
            chooser = _Chooser(given, offer, plan_of(given), models, lambda: "")
            if chooser.has_room(node.role, tp):
                tried[tp] = _OFFLOADS.index(chooser.config.train.offload), given
                if tried[tp][0] == 0:
                    break
        if tried and (tp := min(tried, key=lambda tp: (tried[tp][0], tp))) > 1:
            config = tried[tp][1]
            reason = f"with less, weights and {_LEAST_SEQUENCES} sequences leave the trainer too little room"
            choices.append(Choice(f"placement.nodes.{node.id}.tp", tp, reason))
    return config, tuple(choices)


def _divides(tp: int, ranks: int, shape: ModelShape) -> bool:
    return not any(n % tp for n in (ranks, shape.heads, shape.kv_heads, shape.ffn))


def _with_tp(config: Config, node: str, place: PlaceConfig, tp: int) -> Config:
    nodes = {**config.placement.nodes, node: PlaceConfig(ranks=place.ranks, tp=tp)}
    return _with(config, "placement", nodes=nodes) if tp > 1 else config


class _Chooser:
    def __init__(
        self,
        config: Config,
        offer: "Offer",
        plan: Plan,
        models: Mapping[str, ModelShape],
        vllm: Callable[[], str],
    ) -> None:
        self.config, self.offer, self.plan, self.models, self.vllm = config, offer, plan, models, vllm
        self.choices: list[Choice] = []
        self.trains = any(n.type == "train" for n in plan.flow.nodes)

    def run(self) -> Chosen:
        for section in ("train", "critic") if "critic" in self.models else ("train",):
            self._choose_training(section)
        if any(n.generates for n in self.plan.flow.nodes):
            self._choose_engine()
            self._choose_memory(self._kv_cache)
        else:
            self._choose_memory(lambda: True)
        worst = max(self._phases(), key=lambda phases: self._worst(phases).bytes)
        process = self._process()
        return Chosen(self.config, tuple(self.choices), tuple(worst), process)

    def has_room(self, role: str, tp: int) -> bool:
        """Returns whether a rollout fits, and has room for some sequences of the full length at once."""
        chosen, shape = self.run().config, self.models[role]
        rollouts = [p for phases in self._phases() for p in phases if p.name == ROLLOUT]
        length = min(PROMPT, chosen.data.max_prompt or PROMPT) + chosen.rollout.max_tokens
        per_token = shape.kv_elements * (4 if chosen.train.dtype == "float32" else 2) / tp
        replicas = max(1, len(self.plan.partition_of(self._generates(role)).layout.ranks) // tp)
        sequences = min(_LEAST_SEQUENCES, -(-self.plan.samples // replicas))
        cache = self.config.rollout.kv_cache_gb * GIB
        return self._worst(rollouts).bytes <= self._limit and cache >= sequences * length * per_token

    def _generates(self, role: str) -> str:
        return next(n.id for n in self.plan.flow.nodes if n.generates and n.role == role)

    def _process(self) -> ProcessSettings:
        """Chooses what is set for the process. Keys of the config there are none."""
        cuda = self.offer.kind == "cuda"
        expandable = cuda and not sets_allocator()
        exact = [s for s in ("train", "critic") if getattr(self.config, s).dtype == "float32"]
        tf32 = cuda and (not exact or (exact == ["critic"] and "critic" not in self.models))
        if expandable:
            reason = "tensors of changing sizes leave less unused; PYTORCH_ALLOC_CONF has other ways"
            self.choices.append(Choice("allocator", "expandable_segments", reason))
        if tf32:
            self.choices.append(Choice("float32 products", "TF32", "nothing computes in float32 but what is small"))
        limit = f"{DEVICE_START_LIMIT_S:g} s"
        reason = "models are read and compiled; from then on wait_limit_s"
        self.choices.append(Choice("limit of waits before the first step", limit, reason))
        return ProcessSettings(expandable, tf32)

    def _choose_training(self, section: str) -> None:
        if self.offer.bfloat16:
            self._set(
                section, "dtype", "bfloat16", "twice as fast and half the activations; trained weights stay float32"
            )
        if self.trains:
            self._set(section, "gradient_checkpointing", True, "activations would be most of the memory")

    def _choose_engine(self) -> None:
        rollout = self.config.rollout
        if "engine" not in rollout.model_fields_set:
            why_not = self.vllm()
            self._set(
                "rollout", "engine", *(("builtin", why_not) if why_not else ("vllm", "it is installed, and faster"))
            )
        self._set("rollout", "max_sequences", _SEQUENCES, "decoding reads the weights once for all of them")

    def _choose_memory(self, kv_cache: Callable[[], bool]) -> None:
        """Moves as little of the trainer's state to host memory as leaves room for the rest."""
        both = self.config.train, self.config.critic
        own = any("offload" in c.model_fields_set or c.optimizer != "adamw" for c in both)
        if own or not self.trains or not self.offer.memory:
            kv_cache()
            return
        before, choices = self.config, self.choices
        for offload in _OFFLOADS:
            self.config = _with(_with(before, "train", offload=offload), "critic", offload=offload)
            self.choices = list(choices)
            worst = self._worst([p for phases in self._phases() for p in phases if p.name != ROLLOUT])
            if kv_cache() and worst.bytes <= self._limit:
                break
        if offload != "none":
            what = {"optimizer": "the moments", "all": "weights and moments"}[offload]
            needed = f"{worst.name} needs {human_bytes(worst.bytes)} of {human_bytes(self._limit)}"
            self.choices.append(Choice("train.offload", offload, f"{needed} with {what} in host memory"))

    @property
    def _limit(self) -> float:
        return FITS * self.offer.memory

    def _kv_cache(self) -> bool:
        """Gives the KV cache what is left in a rollout; returns whether it is enough."""
        rollout = self.config.rollout
        if "kv_cache_gb" in rollout.model_fields_set or not self.offer.memory:
            return True
        rollouts = [p for p in self._phases(kv_cache=0.0) if p[-1].name == ROLLOUT]
        if not rollouts:
            return True
        between, *_, rollout_phase = max(rollouts, key=lambda p: p[-1].bytes)
        taken, limit, of = rollout_phase.bytes, self._limit, "free"
        if rollout.gpu_memory_utilization is not None:
            limit, of = rollout.gpu_memory_utilization * self.offer.memory, "allowed by rollout.gpu_memory_utilization"
            taken -= between.bytes
        size = math.floor(10 * max(0.0, limit - taken) / GIB) / 10
        if size > 0:
            reason = f"{human_bytes(limit)} {of}, of which {human_bytes(taken)} are taken in a rollout"
            self.choices.append(Choice("rollout.kv_cache_gb", size, reason))
            self.config = _with(self.config, "rollout", kv_cache_gb=size)
        return size >= _LEAST_CACHE

    def _phases(self, kv_cache: float | None = None) -> list[list[Phase]]:
        """Returns the phases of each kind of rank, a rollout last."""
        of = given(self.config, kv_cache)
        return [phases_of(self.plan, rank, self.models, *of) for rank in unlike_ranks(self.plan)]

    def _worst(self, phases: list[Phase]) -> Phase:
        return max(phases, key=lambda p: p.bytes)

    def _set(self, section: str, key: str, value: Any, reason: str) -> None:
        if key not in getattr(self.config, section).model_fields_set:
            self.config = _with(self.config, section, **{key: value})
            self.choices.append(Choice(f"{section}.{key}", value, reason))


def given(config: Config, kv_cache: float | None = None) -> tuple[Callable[[str], Settings], Engine]:
    """Returns what of a config decides on memory."""
    size = config.rollout.kv_cache_gb * GIB if kv_cache is None else kv_cache

    def settings(role: str) -> Settings:
        section: TrainerConfig = config.critic if role == "critic" else config.train
        return Settings(
            dtype_bytes=4 if section.dtype == "float32" else 2,
            micro_tokens=section.micro_tokens,
            gradient_checkpointing=section.gradient_checkpointing,
            offload=section.offload,
            optimizer=section.optimizer,
            offload_activations=section.offload_activations,
            shard=section.shard_degree,
            trained_share=0.01 if role == "actor" and config.train.lora else 1.0,
            longest=(config.data.max_prompt or PROMPT_TOKENS) + config.rollout.max_tokens,
        )

    return settings, Engine(size, config.rollout.max_sequences)


def unlike_ranks(plan: Plan) -> list[int]:
    """Returns a rank of each kind: those of a kind run the same tasks."""
    return [ranks[0] for ranks in plan.chains()]


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
