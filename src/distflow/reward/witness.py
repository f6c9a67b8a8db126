"""A test and a solution in two processes that share nothing but values.

Both are in the sandbox, where this module needs only the standard library: `answer` is the side of the solution,
`judge` that of the tests. The solution never sees what is expected of it, and its own ideas of equality or of
`AssertionError` do not count. Plain values cross; any other object stays where it is, and the tests hold a `Remote`
that stands for it.
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
_LONGEST = 1_000_000  # elements read of something that is iterated


class GoneError(BaseException):
    """The solution has ended, or its time is up: no `except Exception` of a test takes that for an answer."""


class SolutionError(Exception):
    """The solution raised an exception of its own making."""


def pack(value: Any, keep: Callable[[Any], Any]) -> Any:
    """As JSON has it; what is not plain is handed to `keep`, whose answer is sent."""

    def each(values: Any) -> list[Any]:
        return [pack(v, keep) for v in values]

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
        return each(value)
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: each(value)}
    item = getattr(value, "item", None) if type(value).__module__ == "numpy" else None
    return pack(item(), keep) if item and getattr(value, "shape", None) == () else keep(value)


def unpack(sent: Any, kept: Callable[[int], Any]) -> Any:
    """What was packed; `kept` finds what stands for a number that `keep` gave."""
    if isinstance(sent, list):
        return [unpack(v, kept) for v in sent]
    if not isinstance(sent, dict):
        return sent
    ((kind, what),) = sent.items()
    if kind == "int":
        return int(what, 16)
    if kind == "complex":
        return complex(*what)
    if kind == "bytes":
        return bytes.fromhex(what)
    if kind == "dict":
        return {unpack(k, kept): unpack(v, kept) for k, v in what}
    if kind == "kept":
        return kept(what)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(v, kept) for v in what)


# --- the side of the solution ---

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "get": getattr,
    "put": setattr,
    "item": operator.getitem,
    "put_item": operator.setitem,
    "equal": operator.eq,
    "has": operator.contains,
    "all": lambda x: list(itertools.islice(x, _LONGEST)),
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def answer(solution: str) -> None:
    """Load the solution and do what the tests ask for, until they are done."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    kept: list[Any] = [module]
    loads, dumps, do = json.loads, json.dumps, dict(_OPERATIONS)
    requests, replies = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115

    def keep(value: Any) -> dict[str, int]:
        kept.append(value)
        return {"kept": len(kept) - 1}

    def reply(request: bytes) -> Any:
        what, args, kwargs = loads(request)
        args, before = unpack(args, kept.__getitem__), args
        value = do[what](*args, **{k: unpack(v, kept.__getitem__) for k, v in kwargs.items()})
        changed = {}
        for i, (old, arg) in enumerate(zip(before, args, strict=True)):
            if isinstance(arg, list | dict | set) and (new := pack(arg, keep)) != old:
                changed[str(i)] = new
        return ["ok", pack(value, keep), changed]

    exec(compile(solution, "solution.py", "exec"), module.__dict__)  # what a sandbox is for; if it fails, all fails
    for request in requests:
        try:
            sent = reply(request)
        except BaseException as e:
            sent = ["raised", type(e).__name__, str(e)[:1000]]
        replies.write(dumps(sent).encode() + b"\n")


# --- the side of the tests ---


class Line:
    """To the solution."""

    def __init__(self) -> None:
        self._replies, self._requests = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115

    def ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        request = [what, [pack(a, _number) for a in args], {k: pack(v, _number) for k, v in kwargs.items()}]
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            told = json.loads(self._replies.readline() or "null")
            if told and told[0] == "ok":
                value, changed = unpack(told[1], self._remote), told[2]
                for i, new in changed.items():
                    _replace(args[int(i)], unpack(new, self._remote))
                return value
        except Exception as e:  # it talks nonsense, or is gone
            raise GoneError("the solution does not answer") from e
        match told:
            case ["raised", str(name), str(message)]:
                kind = getattr(builtins, name, None)
                if not (isinstance(kind, type) and issubclass(kind, Exception)):
                    raise SolutionError(f"{name}: {message}")
                raise kind(message)
        raise GoneError("the solution does not answer")

    def _remote(self, number: int) -> "Remote":
        return Remote(self, number)


class Remote:
    """An object of the solution. It equals no value: only what it returns can be right."""

    def __init__(self, line: Line, number: int) -> None:
        self.__dict__.update(_line=line, _kept=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._line.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("put", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._line.ask("put_item", self, key, value)

    def __contains__(self, value: Any) -> bool:
        return self._line.ask("has", self, value) is True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._line.ask("all", self))

    def __next__(self) -> Any:
        return self._line.ask("next", self)

    def __len__(self) -> int:
        return int(self._line.ask("len", self))

    def __bool__(self) -> bool:
        return self._line.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._line.ask("str", self))

    def __repr__(self) -> str:
        return str(self._line.ask("repr", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._line.ask("equal", self, other) is True

    def __hash__(self) -> int:
        return hash(self._kept)


def _number(value: Any) -> dict[str, int]:
    if not isinstance(value, Remote):
        raise TypeError(f"a solution cannot be given a {type(value).__name__}, only plain values")
    return {"kept": value._kept}


def _replace(old: Any, new: Any) -> None:
    """In place, as the solution did it."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and isinstance(new, type(old)):
        old.clear()
        old.update(new)
    else:
        raise GoneError("the solution has changed what cannot be changed")


def judge(setup: str, tests: Sequence[str], names: Sequence[str], seconds: float) -> None:
    """One byte for each test, in order; the first that gets no answer is the last."""

    def late(*_: Any) -> None:
        raise GoneError("its time is up")

    signal.signal(signal.SIGALRM, late)
    verdicts, line = 5, Line()
    space: dict[str, Any] = {"__name__": "tests"}
    ready = False
    for test in tests:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if not ready:
                _bring(line, names, space)
                exec(compile(setup, "setup.py", "exec"), space)  # of the data set, and sandboxed all the same
                ready = True
            exec(compile(test, "test.py", "exec"), space)
            passed = True
        except GoneError:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.write(verdicts, _FAILED if ready else _FAILED * len(tests))  # it would not load for the next one either
            return
        except BaseException:
            passed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(verdicts, _PASSED if passed else _FAILED)


def _bring(line: Line, names: Sequence[str], space: dict[str, Any]) -> None:
    """What the tests mention and the solution has."""
    for name in names:
        try:
            space[name] = line.ask("get", Remote(line, 0), name)
        except Exception:
            continue  # the test that needs it will fail for want of it
