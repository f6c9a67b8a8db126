"""Reads a config file, applies dotted overrides, and explains mistakes in terms of the config's keys."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

from distflow.config.schema import Config
from distflow.config.yaml import MAX_BYTES, parse
from distflow.errors import ConfigError, cut, shown, suggest

# Keys of other frameworks, too different from ours to be suggested by similarity.
SYNONYMS = {"group": "ranks", "groups": "ranks"}
# Sections that may be given by the value of one of their keys: `data: train.jsonl`.
SHORT_FORMS = {"data": "files", "eval": "files", "model": "path", "reward": "functions", "environment": "call"}


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> Config:
    """Reads a file and applies overrides such as `data.batch=64`. Paths are relative to `base`, or to its folder."""
    path = Path(path)
    return make_config(read_config(path), overrides, base or path.parent, str(path), path.stem)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a file, without validation."""
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
    return raw


def make_config(raw: dict[str, Any], overrides: Sequence[str], base: Path, where: str, name: str) -> Config:
    """Applies overrides and validates; `where` starts errors, `name` is for a flow without one."""
    for text in overrides:
        _override(raw, text)
    flow = raw.get("flow")
    raw.setdefault("name", flow.rpartition(":")[2] if isinstance(flow, str) else name)
    if "base" in raw:
        raise ConfigError(f"{where}: unknown key 'base'")
    try:
        return Config.model_validate(raw | {"base": base})
    except ValidationError as e:
        raise ConfigError(f"{where}: {_explain(e)}") from None


def long_form(key: str, value: Any) -> Any:
    """Returns a section as a mapping of keys, also if it was written in its short form."""
    if isinstance(value, str | list) and key in SHORT_FORMS:
        return {SHORT_FORMS[key]: value}
    return value


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{cut(text)}': write it as key=value, for example data.batch=64")
    *parents, last = key.split(".")
    section = raw
    for name in parents:
        inner = section[name] = {} if section.get(name) is None else long_form(name, section[name])
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{cut(text)}': '{cut(name)}' is not a section, it is {shown(inner)}")
        section = inner
    try:
        section[last] = parse(value)
    except ValueError as e:
        raise ConfigError(f"override '{cut(text)}': not a YAML value: {e}") from None


def _explain(error: ValidationError) -> str:
    """Returns all problems, with their keys."""
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
            message = e["msg"].removeprefix("Value error, ")  # of a validator of ours
            problems.append(
                f"'{name}' is {shown(e['input'])}: {message[0].lower()}{message[1:]}" if e["loc"] else message
            )
    first, *more = dict.fromkeys(problems)
    hidden = [f"and {len(more) - 9} more"] if len(more) > 9 else []
    return "; ".join([first, *more[:9], *hidden])


def _suggest_key(key: str, known: list[str]) -> str:
    name = SYNONYMS.get(key)
    if name in known:
        return f"; '{key}' is called '{name}'"
    elsewhere = [f"'{section}.{key.lower()}'" for section in _sections_with(key.lower())]
    if elsewhere and key.lower() not in known:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return suggest(key, known)


def _sections_with(key: str) -> list[str]:
    """Returns the sections of a config that have this key."""
    fields = Config.model_fields.items()
    sections = {name: s for name, field in fields for s in [_section(field.annotation)] if s is not None}
    return [name for name, section in sections.items() if key in section.model_fields]


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = annotation.__args__ if isinstance(annotation, UnionType) else (annotation,)
    return next((t for t in kinds if isinstance(t, type) and issubclass(t, BaseModel)), None)


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
