"""Compares configs with each other and with the defaults, by dotted keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from distflow.config.schema import Config, Section


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested sections with their dotted keys."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))


def changed_from_defaults(config: Config) -> dict[str, Any]:
    """Returns the values that are not the defaults of their keys."""
    return dict(_changed(config, ""))


def _changed(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        if name not in dumped:  # no key of a file
            continue
        value, default = getattr(section, name), field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, Section):
            yield from _changed(value, f"{prefix}{name}.")
        elif field.is_required() or value != default:
            yield f"{prefix}{name}", dumped[name]
