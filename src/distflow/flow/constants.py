"""Checks the constants of flows and nodes: their types follow from annotations or, without one, from defaults."""

import inspect
import json
from collections.abc import Callable
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from distflow.errors import FlowError, shown, suggest

_NAMES = {float: "a number", int: "an integer", bool: "true or false", str: "text", NoneType: "none"}


def check_constant(fn: Callable[..., Any], name: str, value: Any, where: str) -> None:
    """Raises unless `value` fits the parameter `name` of `fn`; `where` names the constant in the error.

    An integer is a number. A parameter without annotation takes the type of its default, or anything if the default is
    None. A parameter takes anything if its annotation is not a type of plain JSON values.
    """
    # Imported late: files with nodes are also loaded by processes that never check a constant.
    from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise FlowError(f"{where} is a {type(value).__name__}; constants are plain JSON values") from None
    parameter = inspect.signature(fn).parameters.get(name)
    expected = _expected_type(fn, parameter) if parameter else Any
    if expected is Any:
        return
    try:
        adapter = TypeAdapter(expected, config=ConfigDict(strict=True, allow_inf_nan=False))
    except (PydanticSchemaGenerationError, PydanticUserError):
        return
    try:
        adapter.validate_json(text)  # JSON: a list is also a tuple
    except ValidationError as e:
        first = e.errors()[0]
        if first["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"):
            raise FlowError(f"{where}: {shown(value)}: {first['msg'].lower()}") from None
        choices = [c for kind in (expected, *get_args(expected)) if get_origin(kind) is Literal for c in get_args(kind)]
        hint = suggest(value, choices) if choices else ""
        raise FlowError(f"{where}: {shown(value)} is not {_describe(expected)}{hint}") from None


def _expected_type(fn: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    annotation, default = parameter.annotation, parameter.default
    if annotation is not parameter.empty:
        holder = SimpleNamespace(__annotations__={parameter.name: annotation})
        try:
            return get_type_hints(holder, fn.__globals__, include_extras=True)[parameter.name]
        except Exception:  # a name that is imported for type checkers only
            return Any
    return type(default) if type(default) in (bool, int, float, str, list, dict) else Any


def _describe(expected: Any) -> str:
    """Returns a description of the values of a type."""
    origin, args = get_origin(expected), get_args(expected)
    if origin is Annotated:
        return _describe(args[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_describe, args)))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    return _NAMES.get(expected) or f"a {expected.__name__ if isinstance(expected, type) and not args else expected}"
