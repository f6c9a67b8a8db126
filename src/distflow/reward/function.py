"""One reward function as a user writes it in a config: where it is, how much it counts, what else it is given."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from distflow.errors import suggest
from distflow.reward.errors import RewardError


@dataclass(frozen=True)
class RewardFunction:
    """`call` is `package.module:name` or `path/to/file.py:name`; `args` are passed by name with every call."""

    call: str
    weight: float = 1.0
    name: str = ""  # in metrics and errors; like the function if it is not given
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.call.rpartition(":")[2])
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise RewardError(f"reward '{self.name}': weight {self.weight!r} is not a number")
        try:
            json.dumps(dict(self.args))
        except TypeError as e:
            raise RewardError(f"reward '{self.name}': args are plain values, as YAML has them: {e}") from None


def functions_of(given: Sequence[RewardFunction | Mapping[str, Any]]) -> tuple[RewardFunction, ...]:
    """Functions from what a config says of them; each has a name of its own."""
    functions = tuple(f if isinstance(f, RewardFunction) else _function(f, i) for i, f in enumerate(given))
    if not functions:
        raise RewardError("reward.functions is empty; name at least one, as `call: path/to/file.py:name`")
    names = [f.name for f in functions]
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"reward.functions: two are called '{name}'; give one of them another `name`")
    return functions


def _function(given: Mapping[str, Any], i: int) -> RewardFunction:
    known = [f.name for f in fields(RewardFunction)]
    for key in given:
        if key not in known:
            raise RewardError(f"reward.functions[{i}]: unknown key '{key}'{suggest(str(key), known)}")
    if not isinstance(given.get("call"), str):
        raise RewardError(f"reward.functions[{i}]: has no `call`; say `call: path/to/file.py:name`")
    return RewardFunction(**given)
