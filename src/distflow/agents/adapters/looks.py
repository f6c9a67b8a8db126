"""Tests of what an object looks like: adapters tell environments by names and methods, and import no package."""

import inspect
from collections.abc import Mapping
from typing import Any

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def has_methods(target: Any, *names: str) -> bool:
    return all(callable(getattr(target, n, None)) for n in names)


def derives_from(target: Any, *names: str) -> bool:
    """Returns whether `value` is a class, or an object of one, with a base of one of these names."""
    cls = target if inspect.isclass(target) else type(target)
    return any(c.__name__ in names for c in cls.__mro__)


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters by name; none if they cannot be inspected."""
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def accepted(target: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a call may give by name; all, if it takes any."""
    parameters = parameters_of(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {n: v for n, v in given.items() if takes_any or n in parameters}


def required_parameters(target: Any) -> list[str]:
    """Returns the names of parameters that a call must give."""
    return [n for n, p in parameters_of(target).items() if p.default is p.empty and p.kind not in _STARRED]
