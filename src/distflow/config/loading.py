"""Reads a config file, applies dotted overrides, and explains mistakes in terms of the config's keys."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

from distflow.config.schema import Config
from distflow.config.yaml import MAX_BYTES, parse
from distflow.errors import ConfigError, cut, shown, suggest

# Keys under names that are not ours and not similar enough to be suggested.
SYNONYMS = {"group": "ranks", "groups": "ranks"}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a file and applies overrides such as `data.batch=64`."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES >> 20} MiB; is it a config?")
        raw = parse(content.decode())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{path} is not YAML: {cut(str(e), 400)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is {'empty' if raw is None else shown(raw, 40)}, not a mapping of keys")
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
    section = raw
    for name in parents:
        inner = section[name] = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{cut(text)}': '{cut(name)}' is not a section, it is {shown(inner)}")
        section = inner
    try:
        section[last] = parse(value)
    except ValueError as e:
        raise ConfigError(f"override '{cut(text)}': not a YAML value: {e}") from None


def _explain(error: ValidationError) -> str:
    """Returns all problems, with the keys they are in."""
    problems = []
    for e in error.errors():
        name = cut(".".join(str(p) for p in e["loc"] if p not in ("str", "list[dict[str,any]]")))
        if e["type"] == "extra_forbidden":
            *parents, key = [str(p) for p in e["loc"]]
            problems.append(f"unknown key '{name}'{_suggest_key(key, _keys_at(parents))}")
        elif e["type"] == "missing":
            problems.append(f"'{name}' is missing; it is required")
        elif e["type"] in ("model_type", "model_attributes_type"):
            keys = ", ".join(_keys_at([str(p) for p in e["loc"]]))
            problems.append(f"'{name}' is {shown(e['input'])}; it is a section with the keys {keys}")
        else:
            problems.append(f"'{name}' is {shown(e['input'])}: {e['msg'][0].lower()}{e['msg'][1:]}")
    first, *more = dict.fromkeys(problems)
    hidden = [f"and {len(more) - 9} more"] if len(more) > 9 else []
    return "; ".join([first, *more[:9], *hidden])


def _suggest_key(key: str, known: list[str]) -> str:
    name = SYNONYMS.get(key)
    return f"; '{key}' is called '{name}'" if name in known else suggest(key, known)


def _keys_at(path: Sequence[str]) -> list[str]:
    """Returns the keys of the section at a path."""
    section: Any = Config
    for part in path:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
        else:
            section = section.__args__[-1]  # dict[str, X] → X (any name is allowed there), list[X] → X
        if isinstance(section, UnionType):
            section = next(t for t in section.__args__ if t is not type(None))  # X | None → X
    fields: Mapping[str, Any] = section.model_fields
    return [f for f in fields if f != "base"]
