"""Finds and runs test functions that nothing calls, as pytest, unittest and HumanEval's harness do."""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from distflow.sandbox import pytest_subset
from distflow.sandbox.rewrite import is_test


def prepare(code: str) -> None:
    """Prepares the test frameworks that `code` uses, so that `run_all` runs their tests and they do not."""
    sys.modules["pytest"] = pytest_subset  # a subset, since the jail has the standard library alone
    if "unittest" in code:
        import unittest

        unittest.main = lambda *_, **__: None  # type: ignore[assignment]


def run_all(new: Mapping[str, Any], ran: Collection[str], entry: Any) -> None:
    """Runs the tests in `new` that have not run by themselves; raises what a test raises.

    These are functions `test…`, classes `Test…` and TestCases, and `check(candidate)`, which gets the `entry` point.
    """
    functions = {name: value for name, value in new.items() if isinstance(value, types.FunctionType)}
    fixtures = {name: value for name, value in functions.items() if hasattr(value, "fixture")}
    for name in ("setUpModule", "setup_module"):
        functions.get(name, _nothing)()
    for name, value in list(new.items()):
        if isinstance(value, type) and value.__module__ == "__main__":
            _run_class(name, value, fixtures, entry)
        elif isinstance(value, types.FunctionType) and is_test(name) and name not in ran:
            functions.get("setup_function", _nothing)()
            _run_function(value, fixtures, entry)


def _run_class(name: str, kind: type, fixtures: Mapping[str, Any], entry: Any) -> None:
    if _is_test_case(kind):
        _run_test_case(kind)
    elif name.startswith("Test"):
        getattr(kind, "setup_class", _nothing)()
        for method in sorted(m for m in dir(kind) if m.startswith("test") and callable(getattr(kind, m))):
            instance = kind()
            own = {n: getattr(instance, n) for n in dir(kind) if hasattr(getattr(kind, n, None), "fixture")}
            getattr(instance, "setup_method", _nothing)()
            _run_function(getattr(instance, method), {**fixtures, **own}, entry)
            getattr(instance, "teardown_method", _nothing)()
        for inner, value in vars(kind).items():
            if isinstance(value, type):
                _run_class(inner, value, fixtures, entry)


def _nothing(*_: Any) -> None:
    """Stands in for a hook that is not defined."""


def _is_test_case(value: type) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and issubclass(value, unittest.TestCase)


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
        with contextlib.ExitStack() as cleanup:
            values = dict(arguments)
            for name, value in fixtures.items():
                if value.autouse and name not in values:
                    _make(name, fixtures, values, cleanup)
            patched = hasattr(function, "patchings")  # `mock.patch` passes its own arguments
            wanted = {} if patched else inspect.signature(function).parameters
            for name, parameter in wanted.items():
                if name in values or parameter.default is not parameter.empty:
                    continue
                if name not in fixtures and name != "capsys":
                    if entry is None or set(wanted) != {name}:
                        raise ValueError(f"the tests' {function.__name__}() has a parameter '{name}' without a value")
                    values[name] = entry
                else:
                    _make(name, fixtures, values, cleanup)
            _finish(function(**{k: v for k, v in values.items() if k in wanted}))


def _make(name: str, fixtures: Mapping[str, Any], values: dict[str, Any], cleanup: contextlib.ExitStack) -> Any:
    """Makes the value of a fixture, after the values of the fixtures that it needs."""
    if name in values:
        return values[name]
    if name == "capsys":
        values[name] = cleanup.enter_context(pytest_subset.CapturedOutput())
        return values[name]
    fixture = fixtures[name]
    needed = [_make(n, fixtures, values, cleanup) for n in inspect.signature(fixture).parameters]
    values[name] = value = fixture(*needed)
    if inspect.isgenerator(value):
        values[name] = next(value)
        cleanup.callback(next, value, None)
    return values[name]


def _finish(result: Any) -> None:
    """Runs an async test or a generator to its end; a generator may yield a function and its arguments."""
    if inspect.iscoroutine(result):
        import asyncio

        asyncio.run(result)
    elif inspect.isgenerator(result):
        for step in result:
            if isinstance(step, tuple) and step and callable(step[0]):
                _finish(step[0](*step[1:]))
