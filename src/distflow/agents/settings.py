"""Settings as frameworks expect them: read by attribute, by key, or by `get`, at any depth."""

from collections.abc import Mapping
from typing import Any


class Settings(dict[str, Any]):
    """A dict whose keys are attributes, too; a key that is missing is None, as in a structured config without it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: Settings(v) if isinstance(v, Mapping) else v for k, v in values.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the values of `over`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged
