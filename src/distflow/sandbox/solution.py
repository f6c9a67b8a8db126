"""The solution's side: loads a program and does what the tests ask of it. Nothing here decides about a verdict.

The program runs in this process and may change anything in it. All it can achieve is to send other data.
"""

import ast
import builtins
import contextlib
import io
import itertools
import json
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distflow.sandbox.wire import BUILTINS, Nodes, pack, unpack, unpack_nodes

_MAX_PRINTED = 1 << 20  # characters per request, which tests may read


def _await(awaitable: Any) -> Any:
    import asyncio  # slow to import, and rarely needed

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _exit(manager: Any, kind: Any, message: str) -> bool:
    """Leaves a context; `kind` is True, or the name of the exception that the tests raised in it."""
    error = None if kind is True else getattr(builtins, kind, Exception)(message)
    return bool(manager.__exit__(type(error) if error else None, error, None))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, /, *args, **kwargs: f(*args, **kwargs),
    "get": lambda x: x,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "iter": iter,
    "take": lambda iterator, count: list(itertools.islice(iterator, count)),
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "type": type,
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "enter": lambda manager: manager.__enter__(),
    "exit": _exit,
    "await": _await,
}
_MUTABLE = (list, dict, set, bytearray)


def serve_solution(program: str, prefix: str = "", shared: str = "", names: Sequence[str] = ()) -> None:
    """Loads the program, says so, and answers requests until the tests close the pipe.

    `prefix` is what the program completes, if it does; `shared` defines the classes `names` that the tests have, too. A
    request is `[number, operation, target, arguments, keyword arguments, nodes, changing]`; the target is a name or a
    reference. A reply is `[number, "ok", value, changed arguments, nodes, printed]`, or `[number, "raised", builtin
    class, message, printed]`.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    # Taken before the program runs, which may patch these modules.
    loads, dumps, dump_error = json.loads, json.dumps, _describe
    server = _Server(module, names)
    requests, replies = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115
    for statement in ast.parse(shared).body:
        with contextlib.suppress(Exception):  # it needs what only the tests have
            exec(compile(ast.Module([statement], []), "setup.py", "exec"), module.__dict__)
    exec(_compile(prefix, program), module.__dict__)  # if this raises, the program passes no test
    replies.write(b'"loaded"\n')
    for line in requests:
        request = loads(line)
        printed = server.capture()
        try:
            reply = [request[0], "ok", *server.answer(request)]
        except BaseException as e:
            reply = [request[0], "raised", *dump_error(e)]
        replies.write(dumps([*reply, printed()]).encode() + b"\n")


class _Server:
    """Answers requests: keeps the objects to which replies refer."""

    def __init__(self, module: types.ModuleType, names: Sequence[str]) -> None:
        self._module, self._names, self._operations = module, names, dict(_OPERATIONS)
        self._objects: list[Any] = []  # a reference is an index into this
        self._numbers: dict[int, int] = {}  # by the identity of an object, which stays, since it is kept

    def answer(self, request: Sequence[Any]) -> list[Any]:
        _, operation, target, packed_args, packed_kwargs, packed_nodes, changing = request
        resolve_ref = unpack_nodes(packed_nodes, self._classes(), self._resolve)
        args = [unpack(a, resolve_ref) for a in packed_args]
        kwargs = {k: unpack(v, resolve_ref) for k, v in packed_kwargs.items()}
        value = self._operations[operation](self._find(target), *args, **kwargs)
        nodes = Nodes()

        def make_ref(other: Any) -> Any:
            if type(other).__name__ in self._names and not isinstance(other, type):
                return nodes.add(other)
            return self._make_ref(other)

        packed, changed = pack(value, make_ref), {}
        if changing:
            before = {**dict(enumerate(packed_args)), **packed_kwargs}
            for key, arg in {**dict(enumerate(args)), **kwargs}.items():
                shared = type(arg).__name__ in self._names
                if shared or (isinstance(arg, _MUTABLE) and pack(arg, make_ref) != before[key]):
                    changed[str(key)] = pack(arg, make_ref)
        return [packed, changed, nodes.pack(make_ref)]

    def capture(self) -> Callable[[], str]:
        """Collects what is printed from now on; returns a function that returns it."""
        data = io.BytesIO()
        sys.stdout = io.TextIOWrapper(data, "utf-8", "surrogatepass", newline="", write_through=True)

        def printed() -> str:
            try:
                return data.getvalue().decode(errors="replace")[:_MAX_PRINTED]
            except ValueError:  # the program has closed it
                return ""

        return printed

    def _classes(self) -> Mapping[str, type]:
        return {n: k for n in self._names if isinstance(k := self._module.__dict__.get(n), type)}

    def _make_ref(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type) and BUILTINS.get(name := value.__name__) is value:
            return {"builtin": name}
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        kind = (
            "await" if isinstance(value, types.CoroutineType) else "iterate" if isinstance(value, Iterator) else "ref"
        )
        return {kind: number}

    def _resolve(self, kind: str, content: Any) -> Any:
        if kind == "builtin":
            return BUILTINS[content]
        return self._find(content) if kind == "ref" else object()

    def _find(self, target: str | int) -> Any:
        return self._objects[target] if isinstance(target, int) else _find(self._module, target)


def _compile(prefix: str, program: str) -> types.CodeType:
    """Compiles a program that completes a prefix, or that is whole by itself."""
    if prefix:
        try:
            return compile(f"{prefix}\n{program}", "solution.py", "exec")
        except (SyntaxError, ValueError):
            pass
    return compile(program, "solution.py", "exec")


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
