"""Runs tests and the solution they test in two sandboxed processes that exchange values only.

`serve_solution` is the solution's side, `run_tests` the tests' side; both need only the standard library. The solution
never sees what is expected of it, and overriding `__eq__` or `AssertionError` there has no effect on the tests. Plain
values are copied; any other object stays with the solution, and the tests hold a `RemoteObject` that refers to it.
"""

import builtins
import itertools
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PASSED, _FAILED = b"1", b"0"
_MAX_ELEMENTS = 1_000_000  # read from an iterator


class SolutionLostError(BaseException):
    """The solution exited, or its time is up. A BaseException, so that no `except Exception` of a test hides it."""


class SolutionError(Exception):
    """The solution raised an exception that is not a builtin."""


def pack(value: Any, make_ref: Callable[[Any], Any]) -> Any:
    """Converts a value to JSON; `make_ref` replaces objects that are not plain values."""

    def pack_each(values: Any) -> list[Any]:
        return [pack(v, make_ref) for v in values]

    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return pack_each(value)
    if isinstance(value, dict):
        return {"dict": [pack_each(pair) for pair in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: pack_each(value)}
    item = getattr(value, "item", None) if type(value).__module__ == "numpy" else None
    return pack(item(), make_ref) if item and getattr(value, "shape", None) == () else make_ref(value)


def unpack(packed: Any, resolve_ref: Callable[[int], Any]) -> Any:
    """Reverses `pack`; `resolve_ref` returns the object for a reference."""
    if isinstance(packed, list):
        return [unpack(v, resolve_ref) for v in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {unpack(k, resolve_ref): unpack(v, resolve_ref) for k, v in content}
    if kind == "ref":
        return resolve_ref(content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(v, resolve_ref) for v in content)


# --- the side of the solution ---

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "eq": operator.eq,
    "contains": operator.contains,
    "list": lambda x: list(itertools.islice(x, _MAX_ELEMENTS)),
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def serve_solution(solution: str) -> None:
    """Loads the solution and executes the tests' requests until they close the pipe."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = [module]  # a reference is an index into this
    # Taken before the solution runs, which may patch these modules.
    loads, dumps, operations = json.loads, json.dumps, dict(_OPERATIONS)
    requests, replies = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115

    def make_ref(value: Any) -> dict[str, int]:
        objects.append(value)
        return {"ref": len(objects) - 1}

    def execute(request: bytes) -> Any:
        operation, packed_args, kwargs = loads(request)
        args = unpack(packed_args, objects.__getitem__)
        value = operations[operation](*args, **{k: unpack(v, objects.__getitem__) for k, v in kwargs.items()})
        changed = {}
        for i, (before, arg) in enumerate(zip(packed_args, args, strict=True)):
            if isinstance(arg, list | dict | set) and (after := pack(arg, make_ref)) != before:
                changed[str(i)] = after
        return ["ok", pack(value, make_ref), changed]

    exec(compile(solution, "solution.py", "exec"), module.__dict__)  # if this raises, the solution passes no test
    for request in requests:
        try:
            reply = execute(request)
        except BaseException as e:
            reply = ["raised", type(e).__name__, str(e)[:1000]]
        replies.write(dumps(reply).encode() + b"\n")


# --- the side of the tests ---


class Connection:
    """Sends requests to the solution's process."""

    def __init__(self) -> None:
        self._replies, self._requests = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        payload = [operation, [pack(a, _ref_of) for a in args], {k: pack(v, _ref_of) for k, v in kwargs.items()}]
        try:
            self._requests.write(json.dumps(payload).encode() + b"\n")
            reply = json.loads(self._replies.readline() or "null")
            if reply and reply[0] == "ok":
                value, changed = unpack(reply[1], self._resolve_ref), reply[2]
                for i, new in changed.items():
                    _update_in_place(args[int(i)], unpack(new, self._resolve_ref))
                return value
        except Exception as e:  # the reply is invalid, or the process is gone
            raise SolutionLostError("the solution does not answer") from e
        match reply:
            case ["raised", str(name), str(message)]:
                kind = getattr(builtins, name, None)
                if not (isinstance(kind, type) and issubclass(kind, Exception)):
                    raise SolutionError(f"{name}: {message}")
                raise kind(message)
        raise SolutionLostError("the solution does not answer")

    def _resolve_ref(self, ref: int) -> "RemoteObject":
        return RemoteObject(self, ref)


class RemoteObject:
    """An object of the solution. It equals no plain value: a solution cannot return one that equals everything."""

    def __init__(self, connection: Connection, ref: int) -> None:
        self.__dict__.update(_connection=connection, _ref=ref)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._connection.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._connection.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._connection.request("setitem", self, key, value)

    def __contains__(self, value: Any) -> bool:
        return self._connection.request("contains", self, value) is True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._connection.request("list", self))

    def __next__(self) -> Any:
        return self._connection.request("next", self)

    def __len__(self) -> int:
        return int(self._connection.request("len", self))

    def __bool__(self) -> bool:
        return self._connection.request("bool", self) is True

    def __str__(self) -> str:
        return str(self._connection.request("str", self))

    def __repr__(self) -> str:
        return str(self._connection.request("repr", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._connection.request("eq", self, other) is True

    def __hash__(self) -> int:
        return hash(self._ref)


def _ref_of(value: Any) -> dict[str, int]:
    if not isinstance(value, RemoteObject):
        raise TypeError(f"a {type(value).__name__} cannot be passed to a solution, only plain values can")
    return {"ref": value._ref}


def _update_in_place(old: Any, new: Any) -> None:
    """Repeats a change that the solution made to an argument."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and isinstance(new, type(old)):
        old.clear()
        old.update(new)
    else:
        raise SolutionLostError("the solution reports a change of an immutable argument")


def run_tests(setup: str, tests: Sequence[str], names: Sequence[str], seconds: float) -> None:
    """Writes one byte per test to descriptor 5, in order; stops after the first test in which the solution is lost."""

    def on_timeout(*_: Any) -> None:
        raise SolutionLostError("the time is up")

    signal.signal(signal.SIGALRM, on_timeout)
    outcomes, connection = 5, Connection()
    namespace: dict[str, Any] = {"__name__": "tests"}
    ready = False
    for test in tests:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if not ready:
                _import_names(connection, names, namespace)
                exec(compile(setup, "setup.py", "exec"), namespace)  # from the data set, but sandboxed all the same
                ready = True
            exec(compile(test, "test.py", "exec"), namespace)
            passed = True
        except SolutionLostError:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # A solution that did not load fails all tests: it would not load for the next one either.
            os.write(outcomes, _FAILED if ready else _FAILED * len(tests))
            return
        except BaseException:
            passed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(outcomes, _PASSED if passed else _FAILED)


def _import_names(connection: Connection, names: Sequence[str], namespace: dict[str, Any]) -> None:
    """Gets the names from the solution that it defines."""
    for name in names:
        try:
            namespace[name] = connection.request("getattr", RemoteObject(connection, 0), name)
        except Exception:
            continue  # the tests that use it fail with a NameError
