"""An environment as a config names it, and the description of its code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.errors import DistflowError


class EnvironmentSetupError(DistflowError):
    """An environment does not load, is of no known kind, or does not fit the data."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """`call` and `tools` are `package.module:name` or `path/to/file.py:name`; `args` are passed to the constructor."""

    name: str
    call: str | None = None
    tools: Sequence[str] = ()
    command: Sequence[str] = ()  # a program instead of `call`
    args: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "auto"
    python: str | None = None  # interpreter of another virtual environment, where its packages are installed
    time_limit_s: float | None = None  # for its next message; None: that of `EnvPool`
    mcp: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → `command` or `url` of a server

    @property
    def where(self) -> str:
        """Returns the beginning of errors."""
        call = self.call or ", ".join(self.tools) or " ".join(self.command) or ", ".join(self.mcp)
        return f"environment '{self.name}' ({call})"


@dataclass(frozen=True)
class Description:
    """The description of an environment. `tools` has the JSON schemas per choice; the only choice is "" unless it is a
    dict of factories, in which case the row's column `environment` chooses among its keys."""

    kind: str
    tools: Mapping[str, list[dict[str, Any]]] = field(default_factory=lambda: {"": []})
    columns: tuple[str, ...] = ()  # that a row must have
    needs_endpoint: bool = False  # it calls the model by HTTP

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Description":
        """Reads it from JSON."""
        return cls(**{**fields, "columns": tuple(fields["columns"])})

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the values of the column `environment`; none if the environment does not read it."""
        return () if set(self.tools) == {""} else tuple(self.tools)
