"""A config bound to code: the implementation of each role, the flow, and the plans. Imports no torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config import Config, load_config
from distflow.config.schema import PlaceConfig, RoleConfig
from distflow.errors import ConfigError, cut, shown, suggest
from distflow.flow import Flow, FlowFunction, from_list
from distflow.flow.graph import SOURCE
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.plan import Load, Place, Placement, Plan, Workload, plan

if TYPE_CHECKING:
    from distflow.data.dataset_view import DatasetView

# The implementation of a role of a built-in flow, unless the config names another.
MODEL_ROLES = {
    "actor": "distflow.engine.roles:Actor",
    "reference": "distflow.engine.roles:Reference",
    "critic": "distflow.engine.roles:Critic",
    "reward_model": "distflow.engine.roles:RewardModel",
}
REWARD_FUNCTIONS = "distflow.reward.reward:Reward"


class Program:
    """Everything about a run that every worker derives alike from its config, before any process starts."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> "Program":
        return cls(load_config(path, overrides))

    @property
    def files(self) -> list[str]:
        return [_resolve(self.config.base, f, "data.files") for f in self.config.data.files]

    @property
    def eval_files(self) -> list[str]:
        assert self.config.eval is not None
        return [_resolve(self.config.base, f, "eval.files") for f in self.config.eval.files]

    @cached_property
    def role_bindings(self) -> dict[str, RoleConfig]:
        """Role → its implementation: the config's, or the built-in one if the config has its section."""
        config, built_in = self.config, dict[str, RoleConfig]()
        if config.model is not None:
            built_in |= {role: RoleConfig(call=call) for role, call in MODEL_ROLES.items()}
        if config.reward is not None and config.reward.model is not None:
            args: dict[str, Any] = {"model": config.reward.model.model_dump()}
            built_in["reward"] = RoleConfig(call=MODEL_ROLES["reward_model"], args=args)
        elif config.reward is not None:
            args = config.reward.model_dump(exclude={"model"})
            args |= {"base": config.base, "log": config.run_folder / "rewards.log"}
            built_in["reward"] = RoleConfig(call=REWARD_FUNCTIONS, args=args)
        return built_in | config.roles

    def implementation(self, role: str) -> Any:
        """Imports the function or class that implements a role."""
        return load(self.role_bindings[role].call, f"roles.{role}", self.config.base)

    @cached_property
    def flow(self) -> Flow:
        config, columns = self.config, self.columns(self.files)
        roles = {r: self.implementation(r) for r in self.role_bindings if r in self._roles_in_use}
        if isinstance(config.flow, list):
            if config.algo:
                raise ConfigError("algo: a flow given as a list has no constants; write them in `params` of its nodes")
            return from_list(config.name, columns, config.flow, roles, config.base)
        return self._function.trace(columns, roles, config.algo)

    @cached_property
    def _roles_in_use(self) -> set[str]:
        """The roles of the flow and of the config; tracing raises if the config binds one that the flow lacks."""
        flow, bound = self.config.flow, self.config.roles
        if isinstance(flow, list):
            calls = [c for e in flow if isinstance(c := e.get("call"), str)]
            return {*bound, *(c.partition(".")[0] for c in calls if ":" not in c)}
        return {*bound, *self._function.roles}

    @cached_property
    def _function(self) -> FlowFunction:
        name = self.config.flow
        assert isinstance(name, str)
        if ":" not in name and name not in BUILT_IN:
            raise ConfigError(f"flow: there is no built-in flow '{cut(name)}'{suggest(name, BUILT_IN)}")
        function = load(BUILT_IN.get(name, name), "flow", self.config.base)
        if not isinstance(function, FlowFunction):
            raise ConfigError(f"flow: '{cut(name)}' is a {type(function).__name__}; mark the function with @flow")
        for role, key, example in (
            ("actor", "model", "a name on the hub, or a directory"),
            ("reward_model", "model", "a name on the hub, or a directory"),
            ("reward", "reward", "file.py:function"),
        ):
            if name in BUILT_IN and role in function.roles and role not in self.role_bindings:
                raise ConfigError(f"'{key}' is missing; the flow '{name}' needs one: `{key}: {example}`")
        return function

    @cached_property
    def repeat(self) -> int:
        """Samples per prompt in a step: the responses per prompt if the flow generates, else 1, or 2 for pairs."""
        data = self.config.data
        generates = any(n.method and n.hand_over for n in self.flow.nodes)
        pairs = any(n.method and n.call.endswith(".encode_pair") for n in self.flow.nodes)
        if pairs and data.repeat not in (None, 2):
            raise ConfigError(f"data.repeat: {data.repeat}; a flow on preference pairs has 2 samples per row")
        return data.repeat or (self.config.rollout.n if generates else 2 if pairs else 1)

    def plan(self, workers: int) -> Plan:
        config = self.config
        for field in config.bytes:
            if field not in self.flow.writer:
                raise ConfigError(f"bytes: there is no field '{cut(field)}'{suggest(field, self.flow.writer)}")
        for node in (n for n in self.flow.nodes if n.type == "train"):
            _check_mini_batches(node.params, config.data.batch)
        workload = Workload(config.data.batch, self.repeat, config.bytes)
        result = plan(self.flow, self._placement(workers), workload)
        for node in (n for n in result.flow.nodes if n.type == "train" and n.method):
            check = getattr(self.implementation(node.role), "check_training", None)
            if check is not None:
                check(config.train, node.role, node.id, result.partition_of(node.id).layout)
        return result

    def eval_plan(self, workers: int, rows: int) -> Plan:
        """Plans the whole held-out set of `rows` prompts as one step."""
        config = self.config
        assert config.eval is not None
        function = load(BUILT_IN["evaluate"], "eval", config.base)
        missing = [r for r in function.roles if r not in self.role_bindings]
        if missing:
            raise ConfigError(f"eval: needs a '{missing[0].replace('actor', 'model')}' in the config")
        roles = {r: self.implementation(r) for r in function.roles}
        # Data for fine-tuning has responses of its own, which evaluation generates instead.
        columns = [c for c in self.columns(self.eval_files) if c != "response"]
        flow = function.trace(columns, roles, {"temperature": config.eval.temperature, "n": config.eval.n})
        training = self._placement(workers)
        trained_on = tuple(r for n in self.flow.nodes if n.role == "actor" for r in training.layout(n.id, n.role).ranks)
        return plan(flow, self._placement(workers, flow), Workload(rows, config.eval.n), {"actor": trained_on})

    def _placement(self, workers: int, flow: Flow | None = None) -> Placement:
        """Returns the config's placement; for another flow, without entries for nodes and roles that it lacks."""
        config = self.config.placement
        nodes = {k: v for k, v in config.nodes.items() if flow is None or k in {n.id for n in flow.nodes} | {SOURCE}}
        roles = {k: v for k, v in config.roles.items() if flow is None or k in {n.role for n in flow.nodes}}
        return Placement(
            workers,
            config.ranks,
            _place(config.default),
            {k: _place(v) for k, v in roles.items()},
            {k: _place(v) for k, v in nodes.items()},
        )

    def dataset(self, plan: Plan) -> "DatasetView":
        """Opens the training data, with the columns that the plan loads."""
        from distflow.data.dataset import Dataset
        from distflow.data.dataset_view import DatasetView

        data = self.config.data
        fields = next(t.fields for t in plan.tasks if isinstance(t, Load))
        original = {new: old for old, new in data.rename.items()}
        dataset = Dataset(self.files, [original.get(f, f) for f in fields], data.on_bad_row)
        return DatasetView(dataset, data.rename)

    def eval_dataset(self) -> "DatasetView | None":
        """Opens the held-out data, up to `eval.limit` rows; None if the config has no `eval` section."""
        if not self.config.eval:
            return None
        import numpy as np

        from distflow.data.dataset import Dataset
        from distflow.data.dataset_view import DatasetView

        view = DatasetView(Dataset(self.eval_files), self.config.data.rename)
        return view.select(np.arange(min(len(view), self.config.eval.limit or len(view))))

    def columns(self, files: Sequence[str]) -> tuple[str, ...]:
        """Returns the columns of data files, renamed by `data.rename`."""
        from distflow.data.dataset import Dataset

        data = self.config.data
        names = data.fields or Dataset(files, on_bad_row=data.on_bad_row).column_names
        for old in data.rename:
            if old not in names:
                raise ConfigError(f"data.rename: there is no column '{cut(old)}'{suggest(old, names)}")
        renamed = tuple(data.rename.get(n, n) for n in names)
        for name in renamed:
            if renamed.count(name) > 1:
                raise ConfigError(f"data: two columns are called '{cut(name)}'; change `data.rename` or `data.fields`")
        return renamed


def _check_mini_batches(params: Mapping[str, Any], batch: int) -> None:
    for key in ("mini_batches", "epochs"):
        count = params.get(key, 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"algo.{key}: {shown(count)}; set it to 1 or more")
    parts = params.get("mini_batches", 1)
    if batch % parts:
        divisors = ", ".join(str(k) for k in range(1, min(batch, 1024) + 1) if batch % k == 0)
        raise ConfigError(
            f"algo.mini_batches: {parts} does not divide the {batch} prompts of data.batch; use one of {divisors}"
        )


def _place(p: PlaceConfig) -> Place:
    return Place(p.ranks, p.dp, p.tp)


def _resolve(base: Path, file: str, key: str) -> str:
    try:
        return str(base / Path(file).expanduser())
    except RuntimeError:
        raise ConfigError(f"{key}: '{cut(file)}': there is no such user; write the full path") from None
