"""One YAML file plus dotted overrides, typed and checked before anything is loaded. Imports no torch."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from distflow.errors import ConfigError, suggest
from distflow.flow import Flow, FlowFunction, from_list
from distflow.flow.call import load
from distflow.plan import Place, Placement, Plan, Workload, plan


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RoleConfig(_Section):
    """Who plays a role: a function, or a class that each worker makes an object of, with `args`."""

    call: str
    args: dict[str, Any] = {}


class DataConfig(_Section):
    """`batch` prompts a step, each `repeat` times. Files are looked up from the folder of the config."""

    files: list[str] = Field(min_length=1)
    batch: int = Field(gt=0)
    repeat: int = Field(1, gt=0)
    fields: list[str] | None = None  # columns to load; by default the keys of the first row
    on_bad_row: Literal["error", "skip"] = "error"

    @field_validator("files", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class PlaceConfig(_Section):
    group: str = "all"
    dp: int | None = Field(None, gt=0)
    tp: int = Field(1, gt=0)

    def place(self) -> Place:
        return Place(self.group, self.dp, self.tp)


class PlacementConfig(_Section):
    groups: dict[str, str] = {}
    default: PlaceConfig = PlaceConfig()
    roles: dict[str, PlaceConfig] = {}
    nodes: dict[str, PlaceConfig] = {}

    @field_validator("groups", mode="before")
    @classmethod
    def _ranks_as_text(cls, value: Any) -> Any:
        return {g: str(r) if isinstance(r, int) else r for g, r in value.items()} if isinstance(value, dict) else value


class Config(_Section):
    """A whole run."""

    flow: str | list[dict[str, Any]]  # `file.py:function` made with @flow, or the nodes themselves
    data: DataConfig
    steps: int = Field(gt=0)
    name: str  # default: that of the flow
    workers: int | None = Field(None, gt=0)
    roles: dict[str, RoleConfig] = {}
    placement: PlacementConfig = PlacementConfig()
    bytes: dict[str, int] = {}  # expected bytes per sample of a field, for estimates in the plan
    seed: int = 0
    run_dir: str | None = None  # default: runs/<name>
    wait_limit_s: float = Field(600.0, gt=0)  # a worker that waits longer for others ends the run
    base: Path = Field(Path(), exclude=True)

    @field_validator("roles", mode="before")
    @classmethod
    def _role_as_text(cls, value: Any) -> Any:
        return (
            {r: {"call": c} if isinstance(c, str) else c for r, c in value.items()}
            if isinstance(value, dict)
            else value
        )

    @property
    def run_folder(self) -> Path:
        return Path(self.run_dir or f"runs/{self.name}")

    @property
    def files(self) -> list[str]:
        return [str(self.base / Path(f).expanduser()) for f in self.data.files]

    @cached_property
    def players(self) -> dict[str, Any]:
        """Role → the function or class that plays it."""
        return {r: load(c.call, f"roles.{r}", self.base) for r, c in self.roles.items()}

    @cached_property
    def graph(self) -> Flow:
        columns = self.data.fields or self._columns_of_first_row()
        if isinstance(self.flow, list):
            return from_list(self.name, columns, self.flow, self.players, self.base)
        found = load(self.flow, "flow", self.base)
        if not isinstance(found, FlowFunction):
            raise ConfigError(f"flow: '{self.flow}' is a {type(found).__name__}; mark the function with @flow")
        return found.trace(columns, self.players)

    def plan(self, workers: int) -> Plan:
        p = self.placement
        placement = Placement(
            workers,
            p.groups,
            p.default.place(),
            {k: v.place() for k, v in p.roles.items()},
            {k: v.place() for k, v in p.nodes.items()},
        )
        for f in self.bytes:
            if f not in self.graph.writer:
                raise ConfigError(f"bytes: there is no field '{f}'{suggest(f, self.graph.writer)}")
        return plan(self.graph, placement, Workload(self.data.batch, self.data.repeat, self.bytes))

    def _columns_of_first_row(self) -> Sequence[str]:
        from distflow.data.rows import Rows

        return Rows(self.files, on_bad_row=self.data.on_bad_row).names


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a file and apply overrides such as `data.batch=64`."""
    path = Path(path)
    try:
        raw = _parse(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, ValueError, TypeError) as e:  # PyYAML lets some of Python's own through
        raise ConfigError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is {'empty' if raw is None else repr(raw)[:40]}, not a mapping of keys")
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


def _parse(text: str) -> Any:
    """YAML in which a key that is written twice is a mistake."""
    todo, seen = [yaml.compose(text, yaml.SafeLoader)], set()
    while todo:
        node = todo.pop()
        if node is None or id(node) in seen:  # an alias leads to a node that was looked at
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key, value in node.value:
                if keys.count(key.value) > 1:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key.value}' is there twice", problem_mark=key.start_mark
                    )
                todo.append(value)
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value
    return yaml.safe_load(text)


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{text}': write it as key=value, for example data.batch=64")
    *parents, last = key.split(".")
    place = raw
    for part in parents:
        inner = place[part] = {} if place.get(part) is None else place[part]
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{text}': '{part}' is not a section, it is {inner!r}")
        place = inner
    try:
        place[last] = _parse(value)
    except (yaml.YAMLError, ValueError, TypeError) as e:
        raise ConfigError(f"override '{text}': not a YAML value: {' '.join(str(e).split())}") from None


def _explain(error: ValidationError) -> str:
    """All problems, one a line, in the words of the config."""
    lines = []
    for e in error.errors():
        where = ".".join(str(p) for p in e["loc"] if p not in ("str", "list[dict[str,any]]"))
        if e["type"] == "extra_forbidden":
            *parents, key = [str(p) for p in e["loc"]]
            lines.append(f"unknown key '{where}'{suggest(key, _keys_at(parents))}")
        elif e["type"] == "missing":
            lines.append(f"'{where}' is missing; it is required")
        elif e["type"] in ("model_type", "model_attributes_type"):
            keys = ", ".join(_keys_at([str(p) for p in e["loc"]]))
            lines.append(f"'{where}' is {e['input']!r}; it is a section with the keys {keys}")
        else:
            lines.append(f"'{where}' is {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}")
    return "; ".join(dict.fromkeys(lines))


def _keys_at(path: Sequence[str]) -> list[str]:
    """The keys allowed in a section, found by walking the types; entries of a mapping are any name."""
    section: Any = Config
    for part in path:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
        else:
            section = section.__args__[1]  # dict[str, X] → X
    fields: Mapping[str, Any] = section.model_fields
    return [f for f in fields if f != "base"]
