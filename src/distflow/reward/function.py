"""A reward function as a config names it: where to import it from, its weight, its extra arguments."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from distflow.errors import suggest
from distflow.reward.errors import RewardError


@dataclass(frozen=True)
class RewardSpec:
    """`call` is `package.module:name` or `path/to/file.py:name`; `args` are passed by name with every call."""

    call: str
    weight: float = 1.0
    name: str = ""  # used in metrics and errors; defaults to the name in `call`
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.call.rpartition(":")[2])
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise RewardError(f"reward '{self.name}': weight {self.weight!r} is not a finite number")
        try:
            json.dumps(dict(self.args))
        except TypeError as e:
            raise RewardError(f"reward '{self.name}': args must be plain values, as in YAML: {e}") from None


def parse_functions(entries: Sequence[RewardSpec | Mapping[str, Any]]) -> tuple[RewardSpec, ...]:
    """Reads the entries of `reward.functions`; their names must be unique."""
    functions = tuple(e if isinstance(e, RewardSpec) else _parse_function(e, i) for i, e in enumerate(entries))
    if not functions:
        raise RewardError("reward.functions is empty; add at least one entry such as `call: path/to/file.py:name`")
    names = [f.name for f in functions]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"reward.functions: two entries are named '{name}'; set another `name` for one of them")
    return functions


def _parse_function(entry: Mapping[str, Any], i: int) -> RewardSpec:
    known = [f.name for f in fields(RewardSpec)]
    for key in entry:
        if key not in known:
            raise RewardError(f"reward.functions[{i}]: unknown key '{key}'{suggest(str(key), known)}")
    if not isinstance(entry.get("call"), str):
        raise RewardError(f"reward.functions[{i}]: has no `call`; add `call: path/to/file.py:name`")
    return RewardSpec(**entry)
