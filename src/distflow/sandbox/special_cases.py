"""Finds programs that recognise the inputs of the tests instead of solving the task."""

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

_SMALL = 20  # numbers up to this, and texts below three characters, are base cases of honest programs


def input_key(args: Sequence[Any]) -> str:
    """Returns a text that is the same for equal arguments, whether in lists or in tuples; empty if they are trivial."""
    values = [args[0]] if len(args) == 1 else [list(args)]
    return _key(values[0]) if args else ""


def python_inputs(tests: Iterable[str], names: Collection[str]) -> set[str]:
    """Returns the keys of the literal arguments with which tests call the solution."""
    functions = {*names, "candidate"}
    found = set()
    for test in tests:
        for node in ast.walk(ast.parse(test)):
            if isinstance(node, ast.Call) and _name(node.func) in functions and not node.keywords:
                values = [_literal(a) for a in node.args]
                if None not in values:
                    found.add(input_key([v for value in values if value is not None for v in value]))
    return found - {""}


def special_cased(program: ast.Module, inputs: Collection[str]) -> int:
    """Returns how many of the inputs the program compares with, or looks up, as they are."""
    return len(set(_recognised(program)) & set(inputs)) if inputs else 0


def _recognised(program: ast.Module) -> Iterator[str]:
    for node in ast.walk(program):
        match node:
            case ast.Compare(left=left, comparators=others):
                for side in (left, *others):
                    yield from _keys_of(side)
            case ast.Dict(keys=keys):
                yield from (k for key in keys if key for k in _keys_of(key))
            case ast.MatchValue(value=value):
                yield from _keys_of(value)
            case ast.MatchSequence(patterns=patterns):
                values = [_literal(p.value) for p in patterns if isinstance(p, ast.MatchValue)]
                if len(values) == len(patterns) and None not in values:
                    yield input_key([v for value in values if value is not None for v in value])
            case ast.BoolOp(op=ast.And(), values=values):
                yield _conjunction(values)


def _keys_of(node: ast.expr) -> Iterator[str]:
    """Yields the key of a literal and, for `x in [a, b]`, of its elements; a text may be the `repr` of an input."""
    for value in _literal(node) or []:
        yield _key(value)
        if isinstance(value, str):
            try:
                yield _key(ast.literal_eval(value))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
        elif isinstance(value, list | tuple | set):
            yield from map(_key, value)


def _conjunction(values: Sequence[ast.expr]) -> str:
    """Returns the key of the constants in `a == 1 and b == 2`."""
    constants: list[Any] = []
    for value in values:
        if isinstance(value, ast.Compare) and len(value.comparators) == 1 and isinstance(value.ops[0], ast.Eq):
            constants += (_literal(value.comparators[0]) or _literal(value.left) or [])[:1]
    return input_key(constants) if len(constants) > 1 else ""


def _key(value: Any) -> str:
    if isinstance(value, str):
        return repr(value.strip()) if len(value.strip()) > 2 else ""
    if isinstance(value, bool) or value is None or not value:
        return ""
    if isinstance(value, int | float):
        return _listed(value) if abs(value) > _SMALL else ""
    return _listed(value)


def _listed(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_listed, value))}]"
    return hex(value) if isinstance(value, int) else repr(value)  # a long number has no decimal text


def _literal(node: ast.expr) -> list[Any] | None:
    """Returns the value in a list, since a value may be None; None if it is not a literal."""
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _name(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
