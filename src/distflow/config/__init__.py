"""One YAML file plus dotted overrides, typed and checked before anything is loaded. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from distflow.config.schema import (
    LONGEST_S,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PlaceConfig,
    PlacementConfig,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    Section,
    Size,
    TrainConfig,
)
from distflow.config.yaml import LARGEST, parse
from distflow.errors import ConfigError, cut, shown, suggest
from distflow.flow import Flow, FlowFunction, from_list
from distflow.flow.graph import SOURCE
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.plan import Load, Place, Placement, Plan, Workload, plan

if TYPE_CHECKING:
    from distflow.data.dataset_view import DatasetView

# Who plays a role of a built-in flow, unless the config says otherwise.
MODELS = {"actor": "Actor", "reference": "Reference", "critic": "Critic", "reward_model": "RewardModel"}
ROLES = "distflow.engine.roles"
REWARD = "distflow.reward.reward:Reward"


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

    @property
    def files(self) -> list[str]:
        return [_from(self.base, f, "data.files") for f in self.data.files]

    @cached_property
    def cast(self) -> dict[str, RoleConfig]:
        """Role → who plays it: as the config says, or what comes with DistFlow for the sections that are given."""
        own: dict[str, RoleConfig] = {}
        if self.model is not None:
            own |= {role: RoleConfig(call=f"{ROLES}:{name}") for role, name in MODELS.items()}
        if self.reward is not None and self.reward.model is not None:
            given = self.reward.model.model_dump()
            own["reward"] = RoleConfig(call=f"{ROLES}:RewardModel", args={"model": given})
        elif self.reward is not None:
            args = self.reward.model_dump(exclude={"model"}) | {
                "base": self.base,
                "log": self.run_folder / "rewards.log",
            }
            own["reward"] = RoleConfig(call=REWARD, args=args)
        return own | self.roles

    def player(self, role: str) -> Any:
        """The function or class that plays a role."""
        return load(self.cast[role].call, f"roles.{role}", self.base)

    @property
    def _players(self) -> dict[str, Any]:
        return {r: self.player(r) for r in self.cast if r in self._wanted}

    @cached_property
    def _wanted(self) -> set[str]:
        """Roles that the flow has, and those that the config binds: if these are not the same, the flow says so."""
        if isinstance(self.flow, list):
            calls = [c for e in self.flow if isinstance(c := e.get("call"), str)]
            return {*self.roles, *(c.partition(".")[0] for c in calls if ":" not in c)}
        return {*self.roles, *self._function.roles}

    @cached_property
    def _function(self) -> FlowFunction:
        assert isinstance(self.flow, str)
        if ":" not in self.flow and self.flow not in BUILT_IN:
            raise ConfigError(f"flow: there is no built-in flow '{cut(self.flow)}'{suggest(self.flow, BUILT_IN)}")
        found = load(BUILT_IN.get(self.flow, self.flow), "flow", self.base)
        if not isinstance(found, FlowFunction):
            raise ConfigError(f"flow: '{cut(self.flow)}' is a {type(found).__name__}; mark the function with @flow")
        for role, key, example in (
            ("actor", "model", "a name on the hub, or a directory"),
            ("reward_model", "model", "a name on the hub, or a directory"),
            ("reward", "reward", "file.py:function"),
        ):
            if self.flow in BUILT_IN and role in found.roles and role not in self.cast:
                raise ConfigError(f"'{key}' is missing; the flow '{self.flow}' needs one: `{key}: {example}`")
        return found

    @cached_property
    def graph(self) -> Flow:
        columns = self.columns(self.files)
        if isinstance(self.flow, list):
            if self.algo:
                raise ConfigError("algo: a flow given as a list has no constants; write them in `params` of its nodes")
            return from_list(self.name, columns, self.flow, self._players, self.base)
        return self._function.trace(columns, self._players, self.algo)

    @cached_property
    def repeat(self) -> int:
        """How often a prompt is in a step: once, or as often as it is to be answered."""
        generates = any(n.method and n.hand_over for n in self.graph.nodes)
        pairs = any(n.method and n.call.endswith(".encode_pair") for n in self.graph.nodes)
        if pairs and self.data.repeat not in (None, 2):
            raise ConfigError(f"data.repeat: {self.data.repeat}; a flow on pairs has 2 samples of each row")
        return self.data.repeat or (self.rollout.n if generates else 2 if pairs else 1)

    def plan(self, workers: int) -> Plan:
        for f in self.bytes:
            if f not in self.graph.writer:
                raise ConfigError(f"bytes: there is no field '{cut(f)}'{suggest(f, self.graph.writer)}")
        for n in (n for n in self.graph.nodes if n.type == "train"):
            for key in ("mini_batches", "epochs"):
                count = n.params.get(key, 1)
                if not isinstance(count, int) or count < 1:
                    raise ConfigError(f"algo.{key}: {shown(count)}; a step has 1 or more of them")
            parts = n.params.get("mini_batches", 1)
            if self.data.batch % parts:
                fits = ", ".join(str(k) for k in range(1, min(self.data.batch, 1024) + 1) if self.data.batch % k == 0)
                raise ConfigError(
                    f"algo.mini_batches: {parts} does not divide the {self.data.batch} prompts of data.batch;"
                    f" what fits: {fits}"
                )
        made = plan(self.graph, self._placement(workers), Workload(self.data.batch, self.repeat, self.bytes))
        if self.train.lora:
            self._check_adapter(made)
        return made

    def _check_adapter(self, plan: Plan) -> None:
        for n in (n for n in plan.flow.nodes if n.type == "train" and n.method):
            player, tp = self.cast[n.role].call, plan.partition_of(n.id).layout.tp
            if player == f"{ROLES}:RewardModel":
                raise ConfigError(f"train.lora: {n.id} trains a reward model, but adapters are for actors; remove it")
            if player != f"{ROLES}:Critic" and tp > 1:
                raise ConfigError(
                    f"placement: {n.id} has tp {tp}, and an adapter (train.lora) is trained with tp 1; use dp alone for"
                    f" it, and for generation any tp: placement.nodes.{n.role}.generate"
                )

    def _placement(self, workers: int, of: Flow | None = None) -> Placement:
        """As configured; for another flow than the config's own, as far as it has such nodes and roles."""
        p = self.placement
        nodes = {k: v for k, v in p.nodes.items() if of is None or k in {n.id for n in of.nodes} | {SOURCE}}
        roles = {k: v for k, v in p.roles.items() if of is None or k in {n.role for n in of.nodes}}
        return Placement(
            workers,
            p.groups,
            _place(p.default),
            {k: _place(v) for k, v in roles.items()},
            {k: _place(v) for k, v in nodes.items()},
        )

    def eval_plan(self, workers: int, rows: int) -> Plan:
        """The whole held-out set of `rows` prompts in one step, filled up to where it divides."""
        assert self.eval is not None
        constants = {"temperature": self.eval.temperature, "rows": rows, "n": self.eval.n}
        function = load(BUILT_IN["evaluate"], "eval", self.base)
        missing = [r for r in function.roles if r not in self.cast]
        if missing:
            raise ConfigError(f"eval: needs a '{missing[0].replace('actor', 'model')}' in the config")
        players = {r: self.player(r) for r in function.roles}
        # Data for fine-tuning has responses of its own, which nobody needs here.
        columns = [c for c in self.columns(self.eval_files) if c != "response"]
        flow = function.trace(columns, players, constants)
        placement = self._placement(workers, flow)
        cells = math.lcm(*(placement.layout(n.id, n.role).dp for n in flow.nodes), placement.source_layout(flow).dp)
        prompts = -(-rows // cells) * cells
        main = self._placement(workers)
        holders = tuple(r for n in self.graph.nodes if n.role == "actor" for r in main.layout(n.id, n.role).ranks)
        return plan(flow, placement, Workload(prompts, self.eval.n), {"actor": holders})

    @property
    def eval_files(self) -> list[str]:
        assert self.eval is not None
        return [_from(self.base, f, "eval.files") for f in self.eval.files]

    def rows(self, plan: Plan) -> "DatasetView":
        """The data, with the columns that the plan loads."""
        from distflow.data.dataset import Dataset
        from distflow.data.dataset_view import DatasetView

        fields = next(t.fields for t in plan.tasks if isinstance(t, Load))
        back = {new: old for old, new in self.data.rename.items()}
        return DatasetView(
            Dataset(self.files, [back.get(f, f) for f in fields], self.data.on_bad_row), self.data.rename
        )

    def columns(self, files: Sequence[str]) -> tuple[str, ...]:
        """What the flow sees of the files, by the names it knows."""
        from distflow.data.dataset import Dataset

        names = self.data.fields or Dataset(files, on_bad_row=self.data.on_bad_row).names
        for old in self.data.rename:
            if old not in names:
                raise ConfigError(f"data.rename: there is no column '{cut(old)}'{suggest(old, names)}")
        seen = tuple(self.data.rename.get(n, n) for n in names)
        for name in seen:
            if seen.count(name) > 1:
                raise ConfigError(f"data: two columns are called '{cut(name)}'; change `data.rename` or `data.fields`")
        return seen


def _place(p: PlaceConfig) -> Place:
    return Place(p.group, p.dp, p.tp)


def _from(base: Path, file: str, where: str) -> str:
    try:
        return str(base / Path(file).expanduser())
    except RuntimeError:
        raise ConfigError(f"{where}: '{cut(file)}': there is no such user; write the whole path") from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a file and apply overrides such as `data.batch=64`."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(f"{path} has more than {LARGEST >> 20} MiB; a config is a YAML file of some lines")
        raw = parse(content.decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{path} is not YAML: {cut(str(e), 400)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is {'empty' if raw is None else shown(raw, 40)}, not a mapping of keys")
    for text in overrides:
        _override(raw, text)
    flow = raw.get("flow")
    raw.setdefault("name", flow.rpartition(":")[2] if isinstance(flow, str) else path.stem)
    if "base" in raw:
        raise ConfigError(f"{path}: unknown key 'base'")
    try:
        return Config.model_validate(raw | {"base": path.parent})
    except ValidationError as e:
        raise ConfigError(f"{path}: {_explain(e)}") from None


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{cut(text)}': write it as key=value, for example data.batch=64")
    *parents, last = key.split(".")
    place = raw
    for part in parents:
        inner = place[part] = {} if place.get(part) is None else place[part]
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{cut(text)}': '{cut(part)}' is not a section, it is {shown(inner)}")
        place = inner
    try:
        place[last] = parse(value)
    except ValueError as e:
        raise ConfigError(f"override '{cut(text)}': not a YAML value: {e}") from None


def _explain(error: ValidationError) -> str:
    """All problems, one a line, in the words of the config."""
    lines = []
    for e in error.errors():
        where = cut(".".join(str(p) for p in e["loc"] if p not in ("str", "list[dict[str,any]]")))
        if e["type"] == "extra_forbidden":
            *parents, key = [str(p) for p in e["loc"]]
            lines.append(f"unknown key '{where}'{suggest(key, _keys_at(parents))}")
        elif e["type"] == "missing":
            lines.append(f"'{where}' is missing; it is required")
        elif e["type"] in ("model_type", "model_attributes_type"):
            keys = ", ".join(_keys_at([str(p) for p in e["loc"]]))
            lines.append(f"'{where}' is {shown(e['input'])}; it is a section with the keys {keys}")
        else:
            lines.append(f"'{where}' is {shown(e['input'])}: {e['msg'][0].lower()}{e['msg'][1:]}")
    first, *more = dict.fromkeys(lines)
    rest = [f"and {len(more) - 9} more"] if len(more) > 9 else []
    return "; ".join([first, *more[:9], *rest])


def _keys_at(path: Sequence[str]) -> list[str]:
    """The keys allowed in a section, found by walking the types; entries of a mapping are any name."""
    section: Any = Config
    for part in path:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
        else:
            section = section.__args__[-1]  # dict[str, X] → X, list[X] → X
        if isinstance(section, UnionType):
            section = next(t for t in section.__args__ if t is not type(None))  # X | None → X
    fields: Mapping[str, Any] = section.model_fields
    return [f for f in fields if f != "base"]
