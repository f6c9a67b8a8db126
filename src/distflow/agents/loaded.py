"""An environment whose code is imported, with the adapter that drives it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distflow.agents.spec import Description, EnvironmentSpec

if TYPE_CHECKING:
    from distflow.agents.adapters.tools import Tool
    from distflow.agents.child import ChildSession, Outcome


class Adapter(Protocol):
    """A module of `adapters`: speaks one interface that environments are written for."""

    @staticmethod
    def describe(environment: "Loaded") -> Description:
        """Runs once, in the process that children are forked from; raises if the environment cannot work."""

    @staticmethod
    def drive(environment: "Loaded", start: Mapping[str, Any], session: "ChildSession") -> "Outcome":
        """Runs one conversation, in its child."""


@dataclass
class Loaded:
    """`target` is what `call` names, None if there are only `tools`."""

    spec: EnvironmentSpec
    target: Any
    adapter: Any  # an `Adapter`
    tools: "list[Tool]" = field(default_factory=list)
    description: Description = field(default_factory=lambda: Description(""))
    base: Path = Path()  # the folder that paths of the config are relative to
