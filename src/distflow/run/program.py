"""A config bound to code: the implementation of each role, the flow, and the plans. Imports no torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config import Config, load_config
from distflow.config.model_shape import ModelShape, reads_images, shape_of
from distflow.config.schema import EnvironmentConfig, PlaceConfig, RewardConfig, RoleConfig
from distflow.dataset import hub, image_rows
from distflow.errors import ConfigError, cut, shown, suggest
from distflow.flow import Flow, FlowFunction, from_list
from distflow.flow.graph import SOURCE
from distflow.flow.importing import load
from distflow.flows import BUILT_IN
from distflow.observe import trackers
from distflow.plan import Load, Place, Placement, Plan, Workload, plan
from distflow.plan.field_bytes import IMAGES, PROMPT_TOKENS, SCORE, known_field
from distflow.roles.role import Role, as_role
from distflow.roles.trained import EXPERTS
from distflow.run_folder import ENVIRONMENTS_LOG, REWARDS_LOG
from distflow.util.extras import how_to_install
from distflow.util.plugins import load_plugin, load_plugins

if TYPE_CHECKING:
    from distflow.dataset.curriculum import Curriculum
    from distflow.dataset.view import DatasetView

ROLES = "distflow.roles"  # the entry points by which packages bring roles
BUILT_IN_ROLES = {
    "actor": "distflow.roles.actor:Actor",
    "agent": "distflow.agents.agent:Agent",  # the actor of a config with environments
    "critic": "distflow.roles.critic:Critic",
    "ema_baseline": "distflow.flows.ema_baseline:EmaBaseline",
    "environment": "distflow.agents.agent:Environment",
    "environment_reward": "distflow.agents.env_reward:EnvironmentReward",
    "frozen": "distflow.roles.frozen:FrozenModel",
    "judge": "distflow.roles.judge:Judge",
    "kl_control": "distflow.flows.kl_control:KLControl",
    "reference": "distflow.roles.frozen:Reference",
    "replaying_actor": "distflow.roles.actor:ReplayingActor",
    "reward": "distflow.reward.reward:Reward",
    "reward_model": "distflow.roles.reward_model:RewardModel",
    "seeing_agent": "distflow.agents.agent:SeeingAgent",
    "teacher_endpoint": "distflow.roles.teacher_endpoint:TeacherEndpoint",
    "teachers": "distflow.roles.frozen:Teachers",
}
MODEL_ROLES = ("actor", "critic", "reference", "reward_model")  # a config with a model binds them by their names
CORRECTION = "rollout_correction"  # a constant of flows that train a policy
EVAL_REWARD = "eval_reward"  # the role of `eval.reward`


class Program:
    """Everything about a run that every worker derives alike from its config, before any process starts.

    `checkpoint`: evaluated instead of the config's model, if the run only evaluates.
    """

    def __init__(self, config: Config, checkpoint: Path | None = None) -> None:
        self.config, self.checkpoint = config, checkpoint

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> "Program":
        return cls(load_config(path, overrides, base))

    def check_installed(self) -> None:
        """Refuses what needs a package that is not installed."""
        trackers.check_installed(self.config.track)
        for key, section in (("train", self.config.train), ("critic", self.config.critic)):
            if section.optimizer == "adamw8bit" and find_spec("torchao") is None:
                raise ConfigError(
                    f"{key}.optimizer: adamw8bit is torchao's, which is not installed; {how_to_install('torchao')}, or"
                    " use another"
                )

    @property
    def files(self) -> list[str]:
        return [_resolve(self.config.base, f, "data.files") for f in self.config.data.all_files]

    @property
    def eval_files(self) -> list[str]:
        assert self.config.eval is not None
        return [_resolve(self.config.base, f, "eval.files") for f in self.config.eval.files]

    @property
    def data_commits(self) -> dict[str, str]:
        """Returns the data sets of the hub in the config, with the commit that each was downloaded from."""
        keys = {
            "data.files": self.config.data.all_files,
            "eval.files": self.config.eval.files if self.config.eval else [],
        }
        named = [(file, key) for key, files in keys.items() for file in files if file.startswith(hub.PREFIX)]
        return {file: hub.commit_of(hub.download(file, key)) for file, key in named}

    @cached_property
    def role_bindings(self) -> dict[str, RoleConfig]:
        """Role → its implementation: the config's, or the built-in one if the config has its section."""
        config, built_in = self.config, dict[str, RoleConfig]()
        if config.model is not None:
            built_in |= {role: RoleConfig(call=role) for role in (*MODEL_ROLES, "ema_baseline")}
        if config.rollout.router_replay:
            if self.environments:
                raise ConfigError("rollout.router_replay: not with conversations; leave one of them out")
            built_in["actor"] = RoleConfig(call="replaying_actor")
        if self.environments:
            args = {"environments": {n: e.model_dump() for n, e in self.environments.items()}}
            log = config.run_folder / ENVIRONMENTS_LOG
            agent = "seeing_agent" if self.reads_images else "agent"
            built_in["actor"] = RoleConfig(call=agent, args=args | {"log": log})
            built_in["reward"] = RoleConfig(call="environment_reward")
            names = {"environment", *config.environments}
            built_in |= {n: RoleConfig(call="environment") for n in names if n not in built_in}
        if config.reward is not None:
            built_in["reward"] = self._reward_binding(config.reward)
        if config.eval is not None and config.eval.reward is not None:
            built_in[EVAL_REWARD] = self._reward_binding(config.eval.reward)
        return built_in | {name: _binding(name, role) for name, role in config.roles.items()}

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """Returns the environments of the config by name; that of `environment` is called so."""
        config = self.config
        return {"environment": config.environment} if config.environment else config.environments

    def _reward_binding(self, reward: RewardConfig) -> RoleConfig:
        if reward.model is not None:
            return RoleConfig(call="reward_model", args={"model": reward.model.model_dump()})
        args = reward.model_dump(exclude={"model"})
        args |= {"base": self.config.base, "log": self.config.run_folder / REWARDS_LOG}
        return RoleConfig(call="reward", args=args)

    def implementation(self, role: str) -> Any:
        """Imports the function or class that implements a role."""
        call, where = self.role_bindings[role].call, f"roles.{role}"
        assert call is not None
        if ":" in call:
            return load(call, where, self.config.base)
        return load_plugin(self._installed_roles, call, where)

    @cached_property
    def _installed_roles(self) -> Mapping[str, EntryPoint]:
        return load_plugins(ROLES, BUILT_IN_ROLES)

    def role_class(self, role: str) -> type[Role]:
        """Returns the class of the objects of a role whose methods are nodes."""
        return as_role(self.implementation(role))

    @cached_property
    def flow(self) -> Flow:
        config, columns = self.config, self.columns(self.files)
        roles = {r: self.implementation(r) for r in self.role_bindings if r in self._roles_in_use}
        if isinstance(config.flow, list):
            if config.algo:
                raise ConfigError("algo: a flow given as a list has no constants; write them in `params` of its nodes")
            return from_list(config.name, columns, config.flow, roles, config.base)
        return self._function.trace(columns, roles, self._constants)

    @property
    def _constants(self) -> dict[str, Any]:
        """Returns the constants of the flow. Stale rollouts are corrected for, unless the config says otherwise."""
        constants = dict(self.config.algo)
        if self.config.rollout.staleness and CORRECTION in self._function.constants:
            constants.setdefault(CORRECTION, "token")
        return constants

    @cached_property
    def _roles_in_use(self) -> set[str]:
        """Returns the roles of flow and config; tracing raises if the config binds one that the flow lacks."""
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
            needed = role in function.roles and role not in function.optional_roles
            if name in BUILT_IN and needed and role not in self.role_bindings:
                raise ConfigError(f"'{key}' is missing; the flow '{name}' needs one: `{key}: {example}`")
        return function

    @cached_property
    def repeat(self) -> int:
        """Samples per prompt in a step: the responses per prompt if the flow generates, else 1, or 2 for pairs."""
        data = self.config.data
        generates = any(n.method and n.generates for n in self.flow.nodes)
        pairs = any(n.method and n.call.endswith(".encode_pair") for n in self.flow.nodes)
        if pairs and data.repeat not in (None, 2):
            raise ConfigError(f"data.repeat: {data.repeat}; a flow on preference pairs has 2 samples per row")
        return data.repeat or (self.config.rollout.n if generates else 2 if pairs else 1)

    def plan(self, workers: int, chunks: bool = True) -> Plan:
        config = self.config
        for field in config.bytes:
            if field not in self.flow.writer:
                raise ConfigError(f"bytes: there is no field '{cut(field)}'{suggest(field, self.flow.writer)}")
        for node in (n for n in self.flow.nodes if n.type == "train"):
            _check_mini_batches(node.params, config.data.batch)
        for node in (
            n for n in self.flow.nodes if n.method and n.call.endswith((".ema_logprobs", ".ema_top_logprobs"))
        ):
            if config.train.ema is None:
                raise ConfigError(f"node '{node.id}': there is no moving average; set its decay: `train.ema: 0.99`")
        workload = Workload(config.data.batch, self.repeat, self._field_bytes(), self._weight_bytes())
        placement, rollout = self._placement(workers), config.rollout
        chunk = rollout.chunk if chunks else None
        ahead = config.data.batch if rollout.partial is True else int(rollout.partial)
        if ahead and not self.environments:  # a conversation rests between its turns
            _check_interruptible(rollout.engine)
        if ahead and self.environments and self.reads_images:
            raise ConfigError("rollout.partial: conversations with images are not carried on; leave one of them out")
        if config.data.curriculum:
            self._check_curriculum()
        result = plan(self.flow, placement, workload, staleness=rollout.staleness, chunk=chunk, prompts_ahead=ahead)
        for node in (n for n in result.flow.nodes if n.type == "train" and n.method):
            layout = result.partition_of(node.id).layout
            self.role_class(node.role).check_training(config.train, node.role, node.id, layout)
        return result

    def checked_plan(self) -> Plan:
        """Plans for the workers of the config, and tries the losses of a flow of the user's own."""
        plan = self.plan(self.config.workers or 1)
        if self.config.flow not in tuple(BUILT_IN):
            from distflow.train.update_spec import check_losses

            check_losses(plan.flow, self.config.base)
        return plan

    def _field_bytes(self) -> dict[str, int]:
        """Returns the expected bytes of a sample's fields: the config's, or what follows from its limits on tokens.

        Responses are expected to have half of what they may have, as in `distflow simulate`.
        """
        config, sizes = self.config, dict[str, int]()
        prompt = min(PROMPT_TOKENS, config.data.max_prompt or PROMPT_TOKENS)
        for field in self.flow.writer if config.model else ():
            if known := known_field(field, self._width(field)):
                sizes[field] = known.of(prompt, config.rollout.max_tokens / 2)
        return sizes | config.bytes

    def _width(self, field: str) -> int:
        """Returns how many numbers a field has for each token."""
        if field in EXPERTS and (shape := self._shape()):
            return shape.layers * shape.active
        writer = self.flow.writer[field]
        return int(self.flow.node(writer).params.get("k", 1)) if writer != SOURCE else 1

    def _weight_bytes(self) -> dict[str, int]:
        """Returns the bytes of the actor's weights as they are synced, if its model is known here."""
        shape = self._shape()
        return {"actor": round(shape.params) * (4 if self.config.train.dtype == "float32" else 2)} if shape else {}

    def _shape(self) -> ModelShape | None:
        try:
            return shape_of(self.config.model, self.config.base) if self.config.model else None
        except (ConfigError, OSError, ValueError):  # of another kind, or not here
            return None

    def eval_plan(self, workers: int, rows: int) -> Plan:
        """Plans the whole held-out set of `rows` prompts as one step."""
        config = self.config
        assert config.eval is not None
        own_reward = "_by_own_reward" if config.eval.reward else ""
        function = load(BUILT_IN["evaluate"] + own_reward, "eval", config.base)
        missing = [r for r in function.roles if r not in self.role_bindings]
        if missing:
            raise ConfigError(f"eval: needs a '{missing[0].replace('actor', 'model')}' in the config")
        roles = {r: self.implementation(r) for r in function.roles}
        # Data for fine-tuning has responses of its own, which evaluation generates instead.
        columns = [c for c in self.eval_columns() if c != "response"]
        flow = function.trace(columns, roles, {"temperature": config.eval.temperature, "n": config.eval.n})
        training = self._placement(workers)
        trained_on = tuple(r for n in self.flow.nodes if n.role == "actor" for r in training.layout(n).ranks)
        return plan(flow, self._placement(workers, flow), Workload(rows, config.eval.n), {"actor": trained_on})

    def _placement(self, workers: int, flow: Flow | None = None) -> Placement:
        """Returns the config's placement; for another flow, without entries for nodes and roles that it lacks."""
        config = self.config.placement
        nodes = {k: v for k, v in config.nodes.items() if flow is None or k in {n.id for n in flow.nodes} | {SOURCE}}
        roles = {k: v for k, v in config.roles.items() if flow is None or k in {n.role for n in flow.nodes}}
        if (
            flow is not None and "actor.converse" in config.nodes
        ):  # evaluation generates where training has conversations
            nodes.setdefault("actor.generate", config.nodes["actor.converse"])
        if flow is None:  # a role that the flow has, but not with these constants, may have a place
            used = {n.role for n in self.flow.nodes}
            roles = {k: v for k, v in roles.items() if k in used or k not in self._roles_in_use}
        if flow is not None and "reward" in config.roles and EVAL_REWARD in {n.role for n in flow.nodes}:
            roles[EVAL_REWARD] = config.roles["reward"]
        return Placement(
            workers,
            config.ranks,
            _place(config.default),
            {k: _place(v) for k, v in roles.items()},
            {k: _place(v) for k, v in nodes.items()},
        )

    def dataset(self, plan: Plan) -> "DatasetView":
        """Opens the training data, with the columns that the plan loads."""
        from distflow.dataset.dataset import Dataset
        from distflow.dataset.view import DatasetView

        data = self.config.data
        fields = next(t.fields for t in plan.tasks if isinstance(t, Load))
        original = {new: old for old, new in data.rename.items()}
        names = [original.get(f, f) for f in fields]
        if self.reads_images:
            columns = Dataset(self.files, on_bad_row=data.on_bad_row).column_names
            in_file = [original.get(c, c) for c in image_rows.COLUMNS]
            names = [n for n in (*names, *in_file) if n in columns]
        dataset = Dataset(self.files, list(dict.fromkeys(names)), data.on_bad_row)
        return DatasetView(dataset, data.rename, images=self._images("train"))

    def curriculum(self, rows: "DatasetView", plan: Plan) -> "Curriculum | None":
        """Returns what draws rows from several sources, or as the model learns; None if the config has neither."""
        from distflow.dataset.curriculum import Curriculum, sources_of_rows
        from distflow.dataset.dataset import resolve_files

        data, base = self.config.data, self.config.base
        if not data.sources and not data.curriculum:
            return None
        counts, ratios = [len(rows.dataset.files)], {"data": 1.0}
        if data.sources:
            named = {n: [_resolve(base, f, "data.sources") for f in s.files] for n, s in data.sources.items()}
            counts = [len(resolve_files(files)) for files in named.values()]
            ratios = {name: s.ratio for name, s in data.sources.items()}
        files = rows.dataset.file_of(rows.numbers)
        return Curriculum(
            sources_of_rows(counts, files),
            ratios,
            data.batch,
            self.config.seed,
            data.shuffle,
            data.curriculum,
            # A step's rows are loaded in the step before, or earlier where some of them are begun earlier.
            plan.staleness + 1 + max(1, -(-plan.prompts_ahead // data.batch)),
        )

    def _check_curriculum(self) -> None:
        """Raises unless the flow has scores to follow, and steps whose prompts do not depend on them already."""
        if SCORE not in self.flow.writer or self.flow.writer[SCORE] == SOURCE:
            raise ConfigError(f"data.curriculum: no node of the flow '{self.flow.name}' writes '{SCORE}'; leave it out")
        if self.flow.sampling_node:
            raise ConfigError(
                f"data.curriculum: '{self.flow.sampling_node.id}' samples dynamically, and chooses prompts by itself;"
                " leave one of them out"
            )

    def eval_dataset(self) -> "DatasetView | None":
        """Opens the held-out data, up to `eval.limit` rows; None if the config has no `eval` section."""
        if not self.config.eval:
            return None
        import numpy as np

        from distflow.dataset.dataset import Dataset
        from distflow.dataset.view import DatasetView

        view = DatasetView(Dataset(self.eval_files), self._eval_rename, images=self._images("eval"))
        return view.select(np.arange(min(len(view), self.config.eval.limit or len(view))))

    def columns(self, files: Sequence[str]) -> tuple[str, ...]:
        """Returns the columns of the training data, renamed by `data.rename`."""
        from distflow.dataset.dataset import Dataset

        data = self.config.data
        names = data.fields or Dataset(files, on_bad_row=data.on_bad_row).column_names
        return self._with_images(_renamed(names, data.rename, "data"))

    def eval_columns(self) -> tuple[str, ...]:
        """Returns the columns of the held-out data, renamed by `eval.rename` or, without that, `data.rename`."""
        from distflow.dataset.dataset import Dataset

        return self._with_images(_renamed(Dataset(self.eval_files).column_names, self._eval_rename, "eval"))

    @cached_property
    def reads_images(self) -> bool:
        """Returns whether the model has a vision tower, so that rows may have images."""
        return reads_images(self.config.model, self.config.base, self._may_have_images)

    def _may_have_images(self) -> bool:
        """Returns whether environments may show images, or the first rows look as if they had some."""
        from distflow.dataset.dataset import Dataset

        if self.environments:
            return True
        sets: list[tuple[list[str], Mapping[str, str]]] = [(self.files, self.config.data.rename)]
        sets += [(self.eval_files, self._eval_rename)] if self.config.eval else []
        here = [(files, rename) for files, rename in sets if all(Path(f).exists() for f in files)]  # else: only planned
        rows = ((Dataset(files, on_bad_row=self.config.data.on_bad_row).first(100), rename) for files, rename in here)
        return any(image_rows.may_have_images(first, rename) for first, rename in rows)

    def _images(self, name: str) -> str | None:
        return name if self.reads_images else None

    def _with_images(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        if self.reads_images:
            return image_rows.names_with_images(columns)
        if self.config.model and IMAGES in columns:
            raise ConfigError(
                f"data: there is a column '{IMAGES}', and the model reads none; give a model that does, or another name"
                " to the column with `data.rename`"
            )
        return columns

    @property
    def _eval_rename(self) -> Mapping[str, str]:
        assert self.config.eval is not None
        return self.config.data.rename if self.config.eval.rename is None else self.config.eval.rename


def _renamed(names: Sequence[str], rename: Mapping[str, str], section: str) -> tuple[str, ...]:
    for old in rename:
        if old not in names:
            default = "; its default is data.rename, set {} for none" if section == "eval" else ""
            raise ConfigError(f"{section}.rename: there is no column '{cut(old)}'{suggest(old, names)}{default}")
    renamed = tuple(rename.get(n, n) for n in names)
    for name in renamed:
        if renamed.count(name) > 1:
            raise ConfigError(f"{section}: two columns are called '{cut(name)}'; change `{section}.rename`")
    return renamed


def _binding(name: str, role: RoleConfig) -> RoleConfig:
    """Returns what implements a role of the config; of one with a model, the class that runs it."""
    if role.model is None:
        return role
    keys = {"actor": "model", "critic": "critic.model", "reward": "reward.model", "reward_model": "model"}
    if name in keys:
        raise ConfigError(f"roles.{name}.model: this role is trained, or built in; its model is `{keys[name]}`")
    call = "reference" if name == "reference" else "frozen"
    return RoleConfig(call=call, args={"model": role.model.model_dump()})


def _check_interruptible(engine: str) -> None:
    from distflow.rollout.engine import load_engine

    if not load_engine(engine).interruptible:
        raise ConfigError(
            f"rollout.partial: the engine '{engine}' cannot be interrupted; use `engine: builtin`, or leave partial out"
        )


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
    return Place(p.ranks, p.dp, p.tp, p.sp)


def _resolve(base: Path, file: str, key: str) -> str:
    if file.startswith(hub.PREFIX):
        return str(hub.download(file, key))
    try:
        return str(base / Path(file).expanduser())
    except RuntimeError:
        raise ConfigError(f"{key}: '{cut(file)}': there is no such user; write the full path") from None
