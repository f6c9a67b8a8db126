"""The sections of a config: what may be said of data, model, rollout, training, reward and evaluation. No torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_one_or_many)]
Pair = Annotated[tuple[float, float], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
Size = Annotated[int, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]
ALL_LINEAR = "all-linear"
LONGEST_S = 1e9  # seconds that the system can wait


class RoleConfig(Section):
    """Who plays a role: a function, or a class that each worker makes an object of, with `args`."""

    call: str
    args: dict[str, Any] = {}


class DataConfig(Section):
    """`batch` prompts a step, each `repeat` times. Files are looked up from the folder of the config."""

    files: Names = Field(min_length=1)
    batch: int = Field(64, gt=0)
    repeat: int | None = Field(None, gt=0)  # default: rollout.n where the flow generates, else 1
    fields: list[str] | None = None  # columns to load; by default the keys of the first row
    rename: dict[str, str] = {}  # column → what the flow calls it, e.g. {question: prompt}
    max_prompt: int | None = Field(None, gt=0)  # tokens; longer ones are bad rows
    on_bad_row: Literal["error", "skip"] = "error"


class PlaceConfig(Section):
    """Where a node or a role runs: the name of a rank set, and how its ranks are divided into dp × tp."""

    ranks: str = "all"
    dp: int | None = Field(None, gt=0)
    tp: int = Field(1, gt=0)


class PlacementConfig(Section):
    """Named rank sets, and where nodes and roles run. The most specific entry wins: node, role, default."""

    ranks: dict[str, str] = {}  # rank set → its ranks, e.g. {rollout: 0-3, train: 4-7}
    default: PlaceConfig = PlaceConfig()
    roles: dict[str, PlaceConfig] = {}
    nodes: dict[str, PlaceConfig] = {}

    @field_validator("ranks", mode="before")
    @classmethod
    def _number_as_string(cls, value: Any) -> Any:
        return {k: str(v) if isinstance(v, int) else v for k, v in value.items()} if isinstance(value, dict) else value


class ModelConfig(Section):
    """`path`: a name on the hub or a directory. Or `arch`: a small model, filled at random, with its own tokenizer."""

    path: str | None = None
    trust_remote_code: bool = False
    arch: str | None = None  # qwen2, llama, …
    hidden: int = Field(256, gt=0)
    layers: int = Field(4, gt=0)
    heads: int | None = Field(None, gt=0)  # default: hidden / 64
    kv_heads: int | None = Field(None, gt=0)  # default: heads
    ffn: int | None = Field(None, gt=0)  # default: 4 × hidden
    vocab: int = Field(258, gt=0)  # tokens; 258 is one per byte
    positions: int = Field(4096, gt=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> "ModelConfig":
        if (self.path is None) == (self.arch is None):
            raise ValueError("give one of `path` (a name on the hub or a directory) and `arch` (made on the spot)")
        if self.heads and self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        return self


def _path(value: Any) -> Any:
    """A model may be given by its path alone."""
    return {"path": value} if isinstance(value, str) else value


class RolloutConfig(Section):
    """How responses are drawn."""

    n: int = Field(8, gt=0)  # responses to a prompt
    max_tokens: int = Field(256, gt=0)
    min_tokens: int = Field(0, ge=0)  # a response does not end before
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: all
    stop: Names = []  # texts of one token that end a response, besides the end-of-sequence token
    kv_cache_gb: float = Field(2.0, gt=0, le=1e6)
    max_sequences: int = Field(256, gt=0)  # in the batch at once


class TrainerConfig(Section):
    """The optimiser and how the work is cut."""

    lr: float = Field(1e-6, ge=0)
    warmup: int = Field(0, ge=0)  # updates
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: Pair = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)  # 0: never
    micro_tokens: int = Field(16384, gt=0)  # in one forward and backward pass of a worker
    dtype: Dtype = "float32"  # of the computation; the weights that are trained are always float32
    gradient_checkpointing: bool = False  # recomputes activations in the backward pass instead of keeping them


class LoraConfig(Section):
    """Matrices of low rank beside linear layers of the actor; they are all that is trained then."""

    rank: int = Field(16, gt=0)
    alpha: float | None = Field(None, gt=0)  # what is added is scaled by alpha / rank; default: 2 × rank
    targets: Names = Field([ALL_LINEAR], min_length=1)  # names of layers, such as q_proj


class TrainConfig(TrainerConfig):
    """How the actor learns."""

    lora: LoraConfig | None = None  # default: all weights are trained


class CriticConfig(TrainerConfig):
    """The critic's own optimiser, and where it starts from."""

    lr: float = Field(1e-5, ge=0)
    model: ModelConfig | None = None  # default: the model of the config

    @field_validator("model", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return _path(value)


class RewardFunction(Section):
    call: str
    weight: float = 1.0
    name: str | None = None  # default: that of the function
    args: dict[str, Any] = {}  # passed by name with every call


class RewardConfig(Section):
    """Functions with verl's or TRL's signature, run in processes of their own that can be killed; or a `model`."""

    functions: list[RewardFunction] = []
    model: ModelConfig | None = None  # one with a single number for a head
    processes: int = Field(1, gt=0)  # of each worker
    time_limit_s: float = Field(30.0, gt=0, le=LONGEST_S)  # for a sample
    on_failure: Literal["error"] | float = "error"  # or the score of a sample for which a function fails
    answer: str | None = None  # the column with the right answer, for functions that take `ground_truth`

    @field_validator("functions", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        many = value if isinstance(value, list) else [value]
        return [{"call": v} if isinstance(v, str) else v for v in many]

    @field_validator("model", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return _path(value)

    @model_validator(mode="after")
    def _one_of_two(self) -> "RewardConfig":
        if bool(self.functions) == bool(self.model):
            raise ValueError(
                "give one of `functions` (file.py:function) and `model` (a directory, or a name on the hub)"
            )
        return self

    @field_validator("on_failure", mode="before")
    @classmethod
    def _whole_number(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class CheckpointConfig(Section):
    """What is kept on disk, so that a run can go on where it was."""

    every: int = Field(50, ge=0)  # steps; 0: only at the end
    keep: int = Field(2, gt=0)  # the newest ones
    best: str | None = None  # and the one with the highest value of this metric, such as val/all/score
    export: bool = False  # beside each, the actor as a Hugging Face directory


class EvalConfig(Section):
    """A held-out set, judged by the same reward before training, every so many steps, and at the end."""

    files: Names = Field(min_length=1)
    every: int = Field(10, gt=0)
    n: int = Field(1, gt=0)  # responses to a prompt; above 1 also pass@2, pass@4, … pass@n
    temperature: float = Field(0.0, ge=0)  # 0: the likeliest tokens
    limit: int | None = Field(None, gt=0)  # rows


class Config(Section):
    """A whole run."""

    flow: str | list[dict[str, Any]]  # a built-in one by name, `file.py:function` made with @flow, or the nodes
    data: DataConfig
    steps: int | None = Field(None, ge=0)  # default: once through the data; 0 only evaluates
    name: str  # default: that of the flow
    algo: dict[str, Any] = Field(default_factory=dict)  # constants of the flow: its parameters that have a default
    model: ModelConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig | None = None
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    workers: int | None = Field(None, gt=0)
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    placement: PlacementConfig = PlacementConfig()
    bytes: dict[str, Size] = Field(default_factory=dict)  # expected, per sample of a field: for estimates in the plan
    seed: int = 0
    run_dir: str | None = None  # default: runs/<name>
    wait_limit_s: float = Field(600.0, gt=0, le=LONGEST_S)  # a worker that waits longer for others ends the run
    stop_limit_s: float = Field(60.0, gt=0, le=LONGEST_S)  # what a run told to end has for its step and checkpoint
    restarts: int = Field(3, ge=0)  # of all workers after a failure that may pass, before it comes any further
    base: Path = Field(Path(), exclude=True)

    @field_validator("roles", mode="before")
    @classmethod
    def _role_as_text(cls, value: Any) -> Any:
        return (
            {r: {"call": c} if isinstance(c, str) else c for r, c in value.items()}
            if isinstance(value, dict)
            else value
        )

    @field_validator("data", "eval", mode="before")
    @classmethod
    def _files_alone(cls, value: Any) -> Any:
        return {"files": value} if isinstance(value, str | list) else value

    @field_validator("model", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("reward", mode="before")
    @classmethod
    def _functions_alone(cls, value: Any) -> Any:
        alone = isinstance(value, str | list) or (isinstance(value, dict) and "call" in value)
        return {"functions": value} if alone else value

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name}")
