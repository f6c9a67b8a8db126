"""The sections and keys of a config, with their types, limits and defaults. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from distflow.errors import cut, suggest
from distflow.rollout.registry import engines


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_score(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _short(key: str, kind: Any = str) -> BeforeValidator:
    """Accepts the value of one key in place of a section."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, kind) else value)


def _each(change: Callable[[Any], Any], kind: type) -> BeforeValidator:
    """Changes the values of this kind in a mapping."""
    return BeforeValidator(
        lambda m: {k: change(v) if isinstance(v, kind) else v for k, v in m.items()} if isinstance(m, dict) else m
    )


def _unset_if_auto(*keys: str) -> Any:
    """Makes `auto` the same as no value for these keys: what they have then is chosen for the device."""

    def drop(values: Any) -> Any:
        return {k: v for k, v in values.items() if v != AUTO or k not in keys} if isinstance(values, dict) else values

    return model_validator(mode="before")(drop)


_CALLS = _each(lambda call: {"call": call}, str)
Names = Annotated[list[str], BeforeValidator(_as_list)]
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
Size = Annotated[int, Field(ge=0)]
ScoreOrError = Annotated[Literal["error"] | float, BeforeValidator(_as_score)]
Dtype = Literal["float32", "bfloat16"]
Offload = Literal["none", "optimizer", "all"]
Optimizer = Literal["adamw", "adamw8bit", "muon", "adafactor"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
ALL_LINEAR = "all-linear"
AUTO = "auto"
MIXTURES = ("mixtral", "qwen3_moe")  # architectures with experts that have blocks of our own
WITH_VISION = ("idefics3", "qwen2_5_vl", "qwen3_vl")  # architectures of which a small one with a vision tower is made
MOST_CUTS_8BIT = 8  # parts of a row, by tensor parallelism, that cut no block of 8-bit moments
MAX_SECONDS = 1e9  # the longest timeout of the system


class SourceConfig(Section):
    """One of several sources of prompts."""

    files: Names = Field(min_length=1)
    ratio: float = Field(1.0, gt=0)  # of the prompts that come from it


class CurriculumConfig(Section):
    """Lets the prompts of later steps follow the skill of the model."""

    pass_score: float = 1.0  # least score of a response that passes
    drop_solved: float | None = Field(None, gt=0, le=1)  # pass rate from which on a prompt is not drawn any more
    drop_unsolved: float | None = Field(None, ge=0, lt=1)  # and down to which
    visits: int = Field(1, gt=0)  # in a row that a prompt has such a pass rate before it is dropped
    adapt: bool = False  # ratios of sources follow their pass rates: most prompts are from sources of which half pass
    floor: float = Field(0.1, gt=0, le=1)  # share of its ratio that a source keeps if all or none pass
    memory: float = Field(0.9, ge=0, lt=1)  # of a source's pass rate, from step to step

    @model_validator(mode="after")
    def _follows(self) -> "CurriculumConfig":
        if not self.adapt and self.drop_solved is None and self.drop_unsolved is None:
            raise ValueError("it follows nothing: give `drop_solved`, `drop_unsolved` or `adapt: true`")
        if (self.drop_unsolved or 0.0) >= (1.0 if self.drop_solved is None else self.drop_solved):
            raise ValueError(f"drop_unsolved {self.drop_unsolved:g} is not below drop_solved {self.drop_solved:g}")
        return self


class DataConfig(Section):
    """`batch` prompts per step, each `repeat` times. Files are relative to the folder of the config."""

    files: Names = []
    batch: int = Field(64, gt=0)
    repeat: int | None = Field(None, gt=0)  # samples per prompt; default: rollout.n if the flow generates, else 1
    fields: list[str] | None = None  # columns to load; default: the keys of the first row
    rename: dict[str, str] = {}  # column → its name in the flow, e.g. {question: prompt}
    max_prompt: int | None = Field(None, gt=0)  # tokens; longer ones are bad rows
    shuffle: bool = True  # false: every epoch has the rows in their order
    rendered: bool = False  # a chat template has written the prompts: special tokens in their text are special
    chat_template_kwargs: dict[str, Any] = {}  # variables of the model's chat template, e.g. {enable_thinking: false}
    on_bad_row: Literal["error", "skip"] = "error"
    sources: Annotated[dict[str, SourceConfig], _each(lambda files: {"files": files}, str)] = {}  # instead of `files`
    curriculum: CurriculumConfig | None = None

    @model_validator(mode="after")
    def _from_somewhere(self) -> "DataConfig":
        if bool(self.files) == bool(self.sources):
            raise ValueError("give one of `files` and `sources` (name → `files` and `ratio`)")
        if self.curriculum and self.curriculum.adapt and len(self.sources) < 2:
            raise ValueError("`curriculum.adapt` changes the ratios of several `sources`")
        return self

    @property
    def all_files(self) -> list[str]:
        """Returns the files of all sources."""
        return [*self.files, *(f for source in self.sources.values() for f in source.files)]


class PlaceConfig(Section):
    """The place of a node or a role: the name of a rank set, and its division into dp × sp × tp."""

    ranks: str = "all"
    dp: int | None = Field(None, gt=0)
    sp: int = Field(1, gt=0)  # ranks that divide the tokens of every sequence, where a model is trained or only run
    tp: int = Field(1, gt=0)


class PlacementConfig(Section):
    """Named rank sets, and where nodes and roles run. The most specific entry wins: node, role, default."""

    ranks: Annotated[dict[str, str], _each(str, int)] = {}  # rank set → its ranks, e.g. {rollout: 0-3, train: 4-7}
    default: PlaceConfig = PlaceConfig()
    roles: dict[str, PlaceConfig] = {}
    nodes: dict[str, PlaceConfig] = {}


class VisionConfig(Section):
    """The vision tower of a small random model."""

    hidden: int = Field(64, gt=0)
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    patch: int = Field(8, gt=0)  # pixels along each side; a token of the language model stands for 2 × 2 patches
    size: int = Field(64, gt=0)  # pixels along each side to which larger images are scaled down

    @model_validator(mode="after")
    def _divisible(self) -> "VisionConfig":
        if self.hidden % (4 * self.heads):
            raise ValueError(f"hidden {self.hidden} is not a multiple of 4 × heads, {4 * self.heads}")
        if self.size % (2 * self.patch):
            raise ValueError(f"size {self.size} is not a multiple of two patches, {2 * self.patch} pixels")
        return self


class ModelConfig(Section):
    """`path`: a name on the hub or a directory. Or `arch`: a small model with random weights and its own tokenizer."""

    path: str | None = None
    trust_remote_code: bool = False
    arch: str | None = None  # qwen2, llama, …
    hidden: int = Field(256, gt=0)
    layers: int = Field(4, gt=0)
    heads: int | None = Field(None, gt=0)  # default: hidden / 64
    kv_heads: int | None = Field(None, gt=0)  # default: heads
    ffn: int | None = Field(None, gt=0)  # of each expert, if there are any; default: 4 × hidden
    experts: int | None = Field(None, gt=0)  # in every layer of a mixture of experts; default: 8
    experts_per_token: int | None = Field(None, gt=0)  # default: 2
    vocab: int = Field(258, gt=0)  # tokens; 258: one per byte
    positions: int = Field(4096, gt=0)
    vision: VisionConfig | None = None  # of an `arch` with a vision tower; default: as in that section

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelConfig":
        if (self.path is None) == (self.arch is None):
            raise ValueError("give one of `path` (a name on the hub or a directory) and `arch` (random weights)")
        if self.heads and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.arch not in MIXTURES and (self.experts or self.experts_per_token):
            raise ValueError(
                f"`experts` and `experts_per_token` are of a small random model, with `arch` {' or '.join(MIXTURES)}"
            )
        if self.vision and self.arch not in WITH_VISION:
            raise ValueError(f"`vision` is of a small random model, with `arch` {' or '.join(WITH_VISION)}")
        experts, active = self.mixture
        if active > experts:
            raise ValueError(f"experts_per_token {active} is more than there are experts, {experts}")
        return self

    @property
    def mixture(self) -> tuple[int, int]:
        """Returns the experts of a layer and the experts per token of a small model; one MLP counts as one."""
        return (self.experts or 8, self.experts_per_token or 2) if self.arch in MIXTURES else (1, 1)


ModelSection = Annotated[ModelConfig | None, _short("path")]


class RoleConfig(Section):
    """The implementation of a role: a function, a class that each worker instantiates, or a frozen model."""

    call: str | None = None
    args: dict[str, Any] = {}
    model: ModelSection = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "RoleConfig":
        if (self.call is None) == (self.model is None):
            raise ValueError(
                "give one of `call` (file.py:name, or an installed name) and `model` (a directory, or a name on the"
                " hub)"
            )
        if self.model is not None and self.args:
            raise ValueError("`args` are those of `call`; a `model` has none")
        return self


class VllmConfig(Section):
    """Settings of the engine `vllm` alone."""

    sampler: Literal["distflow", "vllm"] = "distflow"  # vllm: its own, which is faster; samples depend on their batch
    args: dict[str, Any] = {}  # of vLLM's EngineArgs, such as max_num_batched_tokens and kv_cache_dtype


class RolloutConfig(Section):
    """Settings of generation."""

    engine: str = "builtin"  # its name: builtin, vllm, or one that an installed package brings
    n: int = Field(8, gt=0)  # responses per prompt
    max_tokens: int = Field(256, gt=0)
    min_tokens: int = Field(0, ge=0)  # a response does not end earlier
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: all
    min_p: float = Field(0.0, ge=0, le=1)  # least probability of a token, as a share of the likeliest one's; 0: none
    repetition_penalty: float = Field(1.0, gt=0)  # of tokens that prompt or response have already; 1: none
    stop: Names = []  # tokens that end a response, besides the end-of-sequence token
    kv_cache_gb: float = Field(2.0, gt=0, le=1e6)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)  # instead: share for the engine, with its weights
    max_sequences: int = Field(256, gt=0)  # generated at the same time
    verify_every: int = Field(10, ge=0)  # weight syncs; compares the engine's weights with the trained ones; 0: never
    staleness: int = Field(0, ge=0, le=64)  # steps by which rollout weights are behind
    chunk: int | None = Field(None, gt=0)  # prompts per chunk; default: all
    partial: bool | int = False  # prompts of later steps that may be begun early; true: as many as a batch
    graphs: bool = True  # the built-in engine on CUDA records decoding steps of repeated shapes, and replays them
    router_replay: bool = False  # of a mixture of experts: training uses the experts that generation has chosen

    vllm: VllmConfig = VllmConfig()

    _chosen = _unset_if_auto("engine", "kv_cache_gb", "max_sequences")

    @model_validator(mode="after")
    def _engine_of_settings(self) -> "RolloutConfig":
        if self.vllm != VllmConfig() and self.engine != "vllm":
            raise ValueError("`vllm` has settings of that engine; add `engine: vllm`")
        return self

    @model_validator(mode="after")
    def _one_size(self) -> "RolloutConfig":
        if self.gpu_memory_utilization is not None and "kv_cache_gb" in self.model_fields_set:
            raise ValueError("give one of `kv_cache_gb` (GiB of KV cache) and `gpu_memory_utilization` (a share)")
        return self

    @model_validator(mode="after")
    def _replays_whole_responses(self) -> "RolloutConfig":
        if self.router_replay and self.partial:
            raise ValueError("`router_replay` needs the experts of whole responses, and `partial` begins some early")
        return self

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in (known := engines()):
            raise ValueError(f"there is no engine '{cut(value)}'{suggest(value, known)}")
        return value

    @field_validator("partial", mode="before")
    @classmethod
    def _prompts_ahead(cls, value: Any) -> Any:
        if not isinstance(value, bool) and not (isinstance(value, int) and value > 0):
            raise ValueError("give a number of prompts above 0, or true for as many as a batch has")
        return value


class TrainerConfig(Section):
    """The optimiser, and how a batch is divided."""

    optimizer: Optimizer = "adamw"
    lr: float = Field(1e-6, ge=0)
    warmup: int = Field(0, ge=0)  # updates
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: Pair = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)  # norm; 0: never
    micro_tokens: int = Field(16384, gt=0)  # per micro-batch of a worker
    shard_degree: int | None = Field(None, gt=0)  # dp ranks that share one copy of the model; default: all
    dtype: Dtype = "float32"  # of the computation; the weights that are trained are always float32
    gradient_checkpointing: bool = False  # recomputes activations in the backward pass instead of keeping them
    offload: Offload = (
        "none"  # what is in host memory while nothing computes with it: the optimiser, or the weights too
    )

    compile: bool = False  # layers are compiled by torch.compile
    offload_activations: bool = False  # what a forward pass keeps for the backward pass is in host memory between them

    _chosen = _unset_if_auto("dtype", "gradient_checkpointing", "offload")

    @model_validator(mode="after")
    def _offloads_adamw(self) -> "TrainerConfig":
        if self.optimizer != "adamw" and self.offload != "none":
            raise ValueError(f"`offload: {self.offload}` is for `optimizer: adamw`, not for {self.optimizer}")
        return self

    @model_validator(mode="after")
    def _adafactor_has_its_own(self) -> "TrainerConfig":
        for key in ("betas", "eps"):
            if self.optimizer == "adafactor" and key in self.model_fields_set:
                raise ValueError(f"`{key}` has no effect with `optimizer: adafactor`, which has its own; leave it out")
        return self


class LoraConfig(Section):
    """A LoRA adapter of the actor's linear layers; only the adapter is trained."""

    rank: int = Field(16, gt=0)
    alpha: float | None = Field(None, gt=0)  # the adapter is scaled by alpha / rank; default: 2 × rank
    targets: Names = Field([ALL_LINEAR], min_length=1)  # names of layers, such as q_proj
    use_rslora: bool = False  # scaled by alpha / √rank instead

    @model_validator(mode="before")
    @classmethod
    def _without_dora(cls, given: Any) -> Any:
        if isinstance(given, dict) and "use_dora" in given:
            raise ValueError(
                "`use_dora`: DoRA scales each row of the merged weight by a norm of the whole row, of which engines and"
                " weight syncs have a part; leave it out, use_rslora is supported"
            )
        return given


class TrainConfig(TrainerConfig):
    """Settings of the actor's training."""

    lora: LoraConfig | None = None  # default: all weights are trained
    ema: float | None = Field(None, ge=0, lt=1)  # decay of a moving average of the weights; default: none
    ema_every: int = Field(1, gt=0)  # optimiser steps between two updates of the average
    router_aux_loss: float = Field(0.0, ge=0)  # weight of the loss that evens out the load of experts
    freeze: Annotated[
        list[Literal["vision"]], BeforeValidator(_as_list)
    ] = []  # parts of the model that are not trained


class CriticConfig(TrainerConfig):
    """Settings of the critic's training, and its initial model."""

    lr: float = Field(1e-5, ge=0)
    model: ModelSection = None  # default: the model of the config


class RewardFunctionConfig(Section):
    call: str
    weight: float = 1.0
    name: str | None = None  # default: the name of the function
    args: dict[str, Any] = {}  # keyword arguments of every call


def _as_functions(value: Any) -> Any:
    return [{"call": f} if isinstance(f, str) else f for f in (value if isinstance(value, list) else [value])]


RewardFunctions = Annotated[list[RewardFunctionConfig], BeforeValidator(_as_functions)]


class RewardConfig(Section):
    """Functions with verl's or TRL's signature, which run in processes that can be killed; or a reward `model`."""

    functions: RewardFunctions = []
    model: ModelSection = None  # with one output, the score
    processes: int = Field(1, gt=0)  # per worker
    time_limit_s: float = Field(30.0, gt=0, le=MAX_SECONDS)  # per sample
    on_failure: ScoreOrError = "error"  # or the score of a sample whose function fails
    answer: str | None = None  # column with the right answer, for functions that take `ground_truth`

    @model_validator(mode="after")
    def _one_of_two(self) -> "RewardConfig":
        if bool(self.functions) == bool(self.model):
            raise ValueError(
                "give one of `functions` (file.py:function) and `model` (a directory, or a name on the hub)"
            )
        return self


def _reward_by_functions(value: Any) -> Any:
    functions = isinstance(value, str | list) or (isinstance(value, dict) and "call" in value)
    return {"functions": value} if functions else value


RewardSection = Annotated[RewardConfig | None, BeforeValidator(_reward_by_functions)]


class McpServer(Section):
    """A server of the Model Context Protocol: a program that each conversation starts, or a URL."""

    command: Names = []
    url: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "McpServer":
        if bool(self.command) == bool(self.url):
            raise ValueError("give one of `command` (a program, as a list of words) and `url`")
        return self


class EnvironmentConfig(Section):
    """The other side of a conversation: an environment, tools or an agent program, each in its own process."""

    call: str | None = None  # file.py:name or package.module:name of an environment, a dict of them, or an agent
    tools: Names = []  # functions that the model may call, with `call` or without it
    mcp: dict[str, McpServer] = {}  # servers by name; the model may call their tools
    command: Names = []  # a program instead of `call`; it gets the address and the key of the chat endpoint
    args: dict[str, Any] = {}  # of the environment's constructor
    kind: str = "auto"  # of environment; default: it is recognised
    python: str | None = None  # interpreter of another virtual environment, where its packages are installed
    rewards: RewardFunctions = []  # TRL's that take `environments`: added to the environment's own
    ratio: float = Field(1.0, ge=0)  # of the prompts that get this one of several `environments`
    max_turns: int = Field(10, gt=0)  # of the model
    turn_tokens: int | None = Field(None, gt=0)  # that the model samples in a turn; default: rollout.max_tokens
    time_limit_s: float = Field(30.0, gt=0, le=MAX_SECONDS)  # for each action of the environment
    sample_tokens: int | None = Field(None, gt=0)  # that the model samples in all turns and histories; default: any
    sample_seconds: float | None = Field(None, gt=0, le=MAX_SECONDS)  # of a conversation; default: any
    concurrent: int = Field(64, gt=0)  # conversations of a worker at once
    warm: int = Field(0, ge=0)  # further conversations of a worker whose environments are started ahead
    turns_ahead: int = Field(1, gt=0)  # that a conversation makes in a step before its own, with rollout.partial
    endpoint_host: str = "127.0.0.1"  # address on which a worker's chat endpoint listens; 0.0.0.0: all of the host
    tool_parser: str = "auto"  # how the model writes tool calls; default: as its chat template says
    on_failure: ScoreOrError = 0.0  # the score of a conversation that fails, or "error" to end the run

    @model_validator(mode="after")
    def _something(self) -> "EnvironmentConfig":
        if bool(self.command) and (self.call is not None or self.tools or self.mcp):
            raise ValueError("give one of `command` (a program) and `call`, `tools` or `mcp`")
        if not (self.command or self.call or self.tools or self.mcp):
            names = "`call` (file.py:name), `tools` (file.py:function), `mcp` (servers)"
            raise ValueError(f"give one of {names} and `command` (a program)")
        return self


class CheckpointConfig(Section):
    """When a run saves its state, and how many checkpoints are kept."""

    every: int = Field(50, ge=0)  # steps; 0: only at the end
    keep: int = Field(2, gt=0)  # how many, the newest ones
    best: str | None = None  # also keep the one with the highest value of this metric, such as val/all/score
    export: bool = False  # also write the actor as a Hugging Face directory into each


class EvalConfig(Section):
    """A held-out set, scored before training, every few steps, and at the end."""

    files: Names = Field(min_length=1)
    every: int = Field(10, gt=0)  # steps
    n: int = Field(1, gt=0)  # responses per prompt; above 1 also pass@2, pass@4, … pass@n
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    limit: int | None = Field(None, gt=0)  # rows
    reward: RewardSection = None  # default: the reward of the config
    rename: dict[str, str] | None = None  # default: data.rename


class RecordConfig(Section):
    """Records of the run for `distflow show`, besides the metrics. Their size is bounded."""

    spans: bool = True  # the tasks and waits of every worker
    samples: int = Field(32, ge=0)  # of every step, on all workers together; all responses of some prompts


class TrackerConfig(Section):
    """The names of the run in a tracker; TensorBoard has none of it."""

    project: str | None = None  # of W&B and trackio, the experiment of MLflow; default: its variable, else distflow
    name: str | None = None  # of the run; default: that of its folder
    entity: str | None = None  # of W&B
    group: str | None = None  # of W&B
    tags: Names = []  # of W&B


TRACKER_KEYS = {
    "wandb": ("project", "name", "entity", "group", "tags"),
    "mlflow": ("project", "name"),
    "trackio": ("project", "name"),
}


def _as_trackers(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    return {name: {} for name in names} if isinstance(names, list) else names


class RayConfig(Section):
    """The placement of workers by `--launcher ray`."""

    resources: dict[str, dict[str, Annotated[float, Field(gt=0)]]] = {}  # rank set → resources of each of its workers
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # of Ray's placement group
    start_limit_s: float = Field(600.0, gt=0, le=MAX_SECONDS)  # limit for the cluster to have room


class Config(Section):
    """A run."""

    flow: str | list[dict[str, Any]]  # the name of a built-in flow, `file.py:function` with @flow, or a list of nodes
    data: Annotated[DataConfig, _short("files", str | list)]
    steps: int | None = Field(None, ge=0)  # default: as many as `epochs` have; 0: only evaluate
    epochs: float | None = Field(None, gt=0)  # instead of `steps`; default: 1
    name: str  # default: the name of the flow
    algo: dict[str, Any] = Field(default_factory=dict)  # constants of the flow: its parameters that have a default
    model: ModelSection = None
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardSection = None
    # With environments, the model has conversations instead of single responses.
    environment: Annotated[EnvironmentConfig | None, _short("call")] = None
    environments: Annotated[dict[str, EnvironmentConfig], _CALLS] = {}  # several: by column, or by ratio
    eval: Annotated[EvalConfig | None, _short("files", str | list)] = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    record: RecordConfig = RecordConfig()
    track: Annotated[
        dict[TrackerName, TrackerConfig], BeforeValidator(_as_trackers)
    ] = {}  # further sinks of the metrics
    workers: int | None = Field(None, gt=0)
    roles: Annotated[dict[str, RoleConfig], _CALLS] = {}
    placement: PlacementConfig = PlacementConfig()
    bytes: dict[str, Size] = Field(default_factory=dict)  # field → expected bytes per sample, for the plan's estimates
    seed: int = 0
    run_dir: str | None = None  # default: runs/<name>
    wait_limit_s: float = Field(600.0, gt=0, le=MAX_SECONDS)  # the run ends if a worker waits longer for others
    stop_limit_s: float = Field(60.0, gt=0, le=MAX_SECONDS)  # time to finish the step and its checkpoint after SIGTERM
    restarts: int = Field(3, ge=0)  # after failures that may be temporary, counted since the last progress
    ray: RayConfig = RayConfig()
    base: Path = Field(Path(), exclude=True)  # folder of the config file, which paths are relative to

    @model_validator(mode="after")
    def _one_or_several(self) -> "Config":
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"give one of `steps` ({self.steps}) and `epochs` ({self.epochs:g}), the other as null")
        if self.environment and self.environments:
            raise ValueError("give one of `environment` and `environments`")
        hosts = sorted({e.endpoint_host for e in self.environments.values()})
        if len(hosts) > 1:
            raise ValueError(
                f"environments: they have different values of endpoint_host, {' and '.join(hosts)}, and the endpoint of"
                " a worker has one address; give all of them the same"
            )
        if self.environments and not any(e.ratio for e in self.environments.values()):
            raise ValueError("environments: all have the ratio 0; give one of them a ratio above 0")
        return self

    @field_validator("track")
    @classmethod
    def _takes_these(cls, value: dict[TrackerName, TrackerConfig]) -> dict[TrackerName, TrackerConfig]:
        for name, settings in value.items():
            for key in settings.model_fields_set:
                if key not in (keys := TRACKER_KEYS.get(name, ())) and getattr(settings, key):
                    raise ValueError(f"{name} has no '{key}'{suggest(key, keys)}")
        return value

    def steps_of(self, rows: int) -> int:
        """Returns the steps of a run on this many rows."""
        if self.steps is not None:
            return self.steps
        return max(1, int((1 if self.epochs is None else self.epochs) * rows / self.data.batch))

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name}")
