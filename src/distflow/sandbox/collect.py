"""Finds and runs test functions that nothing calls, as pytest, unittest and HumanEval's harness do."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from distflow.sandbox import pytest_subset


def prepare(code: str) -> None:
    """Makes the frameworks ready that `code` uses; what they would run by themselves, `run_all` runs."""
    sys.modules["pytest"] = pytest_subset  # a subset, since the jail has the standard library alone
    if "unittest" in code:
        import unittest

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]


def run_all(code: str, new: Mapping[str, Any], entry: Any) -> None:
    """Runs what `code` has defined in `new` and does not call itself; raises what a test raises.

    These are functions `test…`, classes `Test…` and TestCases, and `check(candidate)`, which gets the `entry` point.
    """
    new = {name: value for name, value in new.items() if isinstance(value, type | types.FunctionType)}
    called = _names_used(code) if new else set()
    for name, value in new.items():
        if isinstance(value, type) and _is_test_case(value):
            _run_test_case(value)
        elif name in called:
            continue
        elif isinstance(value, types.FunctionType) and (name.startswith("test") or name == "check"):
            _run_function(value, new, entry)
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [m for m in vars(value) if m.startswith("test")]:
                instance = value()
                getattr(instance, "setup_method", lambda: None)()
                _run_function(getattr(instance, method), new, entry)


def _names_used(code: str) -> set[str]:
    """Returns the names that are read outside functions and classes."""
    names = set()
    pending: list[ast.AST] = list(ast.parse(code).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            pending.extend(ast.iter_child_nodes(node))
    return names


def _is_test_case(value: type) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and issubclass(value, unittest.TestCase) and value.__module__ == "__main__"


def _run_test_case(case: type) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    for _, trace in [*result.errors, *result.failures]:
        raise AssertionError(trace[-200:])
    if not result.wasSuccessful() or result.skipped:
        raise AssertionError("a test was skipped, or passed although it must not")


def _run_function(function: Callable[..., Any], fixtures: Mapping[str, Any], entry: Any) -> None:
    for arguments in pytest_subset.parameter_sets(function):
        values, generators = dict(arguments), []
        for name, parameter in inspect.signature(function).parameters.items():
            if name in values or parameter.default is not parameter.empty:
                continue
            fixture = getattr(fixtures.get(name), "fixture", None)
            if fixture is None:
                if entry is None or set(inspect.signature(function).parameters) != {name}:
                    raise ValueError(f"the tests' {function.__name__}() has a parameter '{name}' without a value")
                values[name] = entry
            elif inspect.isgeneratorfunction(fixture):
                generators.append(fixture())
                values[name] = next(generators[-1])
            else:
                values[name] = fixture()
        function(**values)
        for generator in generators:
            next(generator, None)
