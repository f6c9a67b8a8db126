"""Adapters of environments: each speaks one interface that environments are written for; found by entry point."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.agents.spec import Description, EnvironmentSetupError, EnvironmentSpec
from distflow.errors import suggest
from distflow.util.plugins import load_plugin, load_plugins

if TYPE_CHECKING:
    from distflow.agents.adapters.tools import Tool
    from distflow.agents.child import ChildSession, Outcome

GROUP = "distflow.environments"  # entry points that name an `EnvironmentAdapter`
_HERE = "distflow.agents.adapters"
# kind → its adapter. The first that matches an object decides: TRL's is the widest, and comes last.
BUILT_IN = {
    "program": f"{_HERE}.program:ADAPTER",
    "tools": f"{_HERE}.trl:TOOLS",
    "verl_loop": f"{_HERE}.verl_loop:ADAPTER",
    "skyrl": f"{_HERE}.skyrl:ADAPTER",
    "openrlhf": f"{_HERE}.openrlhf:ADAPTER",
    "openenv": f"{_HERE}.openenv:ADAPTER",
    "reasoning_gym": f"{_HERE}.reasoning_gym:ADAPTER",
    "verifiers": f"{_HERE}.verifiers:ADAPTER",
    "harbor": f"{_HERE}.harbor:ADAPTER",
    "trl": f"{_HERE}.trl:ADAPTER",
}


@dataclass
class LoadedEnvironment:
    """An environment whose code is imported. `target` is what `call` names, None if there are only `tools`."""

    spec: EnvironmentSpec
    target: Any
    adapter: "EnvironmentAdapter"
    tools: "list[Tool]" = field(default_factory=list)
    description: Description = field(default_factory=lambda: Description(""))
    base: Path = Path()  # the folder that paths of the config are relative to


@dataclass(frozen=True)
class EnvironmentAdapter:
    """Drives environments of one kind. Importing it must not need the package that they are written for.

    `describe` runs once, in a process that ends thereafter, and raises if the environment cannot work; `drive` runs one
    conversation, in its process.
    """

    describe: Callable[[LoadedEnvironment], Description]
    drive: Callable[[LoadedEnvironment, Mapping[str, Any], "ChildSession"], "Outcome"]
    matches: Callable[[Any], bool]  # whether an object is of this kind, by its names and methods
    what: str  # such an object, for errors
    tested_with: tuple[str, ...] = ()  # packages of its interface that CI tests it with; none: only look-alikes
    takes: tuple[str, ...] = ()  # of `tools` and `mcp`, which may stand beside `call`
    package: str = ""  # whose names `call` may have instead of a module's: `package:name`
    by_name: Callable[[str, str], Any] = lambda name, where: name  # returns the object of a name; None: an import
    prepare: Callable[[], Any] = lambda: None  # imports what all conversations need


def adapter_of(kind: str, where: str) -> EnvironmentAdapter:
    """Returns the adapter of a kind; errors begin with `where`."""
    if kind not in _plugins():
        raise EnvironmentSetupError(f"{where}: kind '{kind}' is not known{suggest(kind, _plugins())}")
    adapter = load_plugin(_plugins(), kind, where)
    if not isinstance(adapter, EnvironmentAdapter):
        raise EnvironmentSetupError(
            f"{where}: the entry point '{kind}' of {GROUP} is a {type(adapter).__name__}, not an EnvironmentAdapter"
        )
    return adapter


def adapters() -> Iterator[tuple[str, EnvironmentAdapter]]:
    """Yields each kind and its adapter: installed ones first, so that they decide before the built-in ones."""
    for kind in [*(k for k in _plugins() if k not in BUILT_IN), *BUILT_IN]:
        yield kind, adapter_of(kind, "environment")


@functools.cache
def _plugins() -> dict[str, EntryPoint]:
    return load_plugins(GROUP, BUILT_IN)
