"""Finds and loads what installed packages bring by entry point, beside the built-in ones: roles, rollout engines."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from distflow.errors import ConfigError, cut, suggest


def load_plugins(group: str, built_in: Mapping[str, str] = MappingProxyType({})) -> dict[str, EntryPoint]:
    """Returns the entry points of a group by name, after `built_in`: name → `module:attribute`. Imports none of them.

    Raises if two packages bring the same name: it is not left to the order of a path which one a run uses.
    """
    found = {name: EntryPoint(name, value, group) for name, value in built_in.items()}
    for entry in entry_points(group=group):
        if (other := found.get(entry.name)) is not None and other.value != entry.value:
            raise ConfigError(
                f"the packages {package_of(other)} and {package_of(entry)} both bring '{cut(entry.name)}' (entry point"
                f" group {group}); uninstall one of them"
            )
        found[entry.name] = entry
    return found


def load_plugin(plugins: Mapping[str, EntryPoint], name: str, where: str) -> Any:
    """Imports the plugin of a name. Errors begin with `where`, and name the package that brings it."""
    if name not in plugins:
        raise ConfigError(
            f"{where}: nothing installed is called '{cut(name)}'{suggest(name, plugins)}. Code of your own is"
            " 'path/to/file.py:name' or 'package.module:name'"
        )
    entry = plugins[name]
    try:
        return entry.load()
    except (Exception, SystemExit) as e:
        raise ConfigError(
            f"{where}: '{name}' of the package {package_of(entry)} ({entry.value}) does not import:"
            f" {type(e).__name__}: {cut(str(e), 300)}"
        ) from e


def package_of(entry: EntryPoint) -> str:
    """Returns the package that brings an entry point."""
    return entry.dist.name if entry.dist else "distflow"
