"""The solution's side: loads a program and does what the tests ask of it. Nothing here decides about a verdict.

The program runs in this process and may change anything in it. All it can achieve is to send other data.
"""

import itertools
import json
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from distflow.sandbox.wire import pack, unpack

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "get": lambda x: x,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "iter": iter,
    "take": lambda iterator, count: list(itertools.islice(iterator, count)),
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}
_MUTABLE = (list, dict, set, bytearray)


def serve_solution(program: str) -> None:
    """Loads the program, says so, and answers requests until the tests close the pipe.

    A request is `[number, operation, target, arguments, keyword arguments]`; the target is a name or a reference. A
    reply is `[number, "ok", value, changed arguments]`, or `[number, "raised", builtin class, message]`.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    objects: list[Any] = []  # a reference is an index into this
    # Taken before the program runs, which may patch these modules.
    loads, dumps, operations = json.loads, json.dumps, dict(_OPERATIONS)
    requests, replies = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115

    def make_ref(value: Any) -> dict[str, int]:
        objects.append(value)
        return {"iterate" if isinstance(value, Iterator) else "ref": len(objects) - 1}

    def resolve_ref(kind: str, content: Any) -> Any:
        return objects[content] if kind == "ref" else object()

    def find(target: str | int) -> Any:
        return objects[target] if isinstance(target, int) else _find(module, target)

    def execute(request: bytes) -> Any:
        number, operation, target, packed_args, packed_kwargs = loads(request)
        try:
            args = unpack(packed_args, resolve_ref)
            kwargs = {k: unpack(v, resolve_ref) for k, v in packed_kwargs.items()}
            value = operations[operation](find(target), *args, **kwargs)
            changed = {}
            if value is None:  # by convention a function that changes its arguments returns nothing
                before = {**dict(enumerate(packed_args)), **packed_kwargs}
                for key, arg in {**dict(enumerate(args)), **kwargs}.items():
                    if isinstance(arg, _MUTABLE) and (after := pack(arg, make_ref)) != before[key]:
                        changed[str(key)] = after
            return [number, "ok", pack(value, make_ref), changed]
        except BaseException as e:
            return [number, "raised", *_describe(e)]

    exec(compile(program, "solution.py", "exec"), module.__dict__)  # if this raises, the program passes no test
    replies.write(b'"loaded"\n')
    for request in requests:
        replies.write(dumps(execute(request)).encode() + b"\n")


def _find(module: types.ModuleType, name: str) -> Any:
    """Returns a method of `Solution`, as on LeetCode, or what the program calls by that name."""
    owner = getattr(module, "Solution", None)
    if isinstance(owner, type) and hasattr(owner, name):
        return getattr(owner(), name)
    if name not in module.__dict__:
        raise NameError(f"name '{name}' is not defined")
    return module.__dict__[name]


def _describe(error: BaseException) -> tuple[str, str]:
    """Returns the name of the nearest builtin class, which tests know, and the message."""
    kind = next(k.__name__ for k in type(error).__mro__ if k.__module__ == "builtins")
    try:
        return kind, str(error)[:1000]
    except Exception:  # its `__str__` is the solution's
        return kind, ""
