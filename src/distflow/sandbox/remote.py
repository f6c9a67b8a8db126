"""Stand-ins, beside the tests, for objects in the solution's process."""

import builtins
import collections
import contextlib
import datetime
import dis
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from distflow.sandbox.rewrite import MUTATORS
from distflow.sandbox.wire import BUILTINS, Nodes, pack, unpack, unpack_nodes

_MAX_REPLY = 1 << 24  # bytes
_MAX_TAKEN = 1024  # elements of an iterator that are read at once
_MAX_ELEMENTS = 1_000_000  # of an iterator that is an argument
# These steer the interpreter, so they would end loops of the tests.
_NOT_RAISED = (StopIteration, StopAsyncIteration)
_DATA = (
    str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, collections.deque,
    collections.Counter, datetime.datetime, datetime.timedelta,
)  # fmt: skip
# Methods that tests call on data, arrays and frames. Only data may answer them: an object that the solution returns in
# place of data would decide whether it is right. What changes an object is no verdict.
_METHODS_OF_DATA = {n for kind in _DATA for n in dir(kind) if n[0] != "_"} - MUTATORS | {
    "all", "any", "array_equal", "compare", "eq", "equals", "isclose", "item", "max", "mean", "min", "ne", "std",
    "sum", "to_dict", "tolist",
}  # fmt: skip
_DESCRIBING = {"__name__", "__qualname__"}


class SolutionLostError(BaseException):
    """The solution exited, or its time is up. A BaseException, so that no `except Exception` of a test hides it."""


class SolutionError(Exception):
    """The solution raised or returned something that tests must not see as it is, such as `SystemExit`."""


class SolutionConnection:
    """Sends requests to the solution's process; `lost` stays true whatever the tests catch.

    Without a solution (`dry`) it counts the first question and is lost. Objects of `classes`, which the tests define,
    arrive as such.
    """

    def __init__(self, dry: bool = False) -> None:
        if not dry:
            self._replies, self._requests = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115
        self.loaded = self.lost = False
        self.classes: dict[str, type] = {}
        self.calls = 0  # that were answered
        self.asked = 0  # those, and other questions that were answered with a value
        self.strange: list[str] = []  # what no honest program does
        self.numbers: deque[Any] = deque(maxlen=256)  # that the solution answered last
        self.dry = dry
        self._number = 0  # of requests
        self.named: dict[str, RemoteObject] = {}  # what the tests take from the solution
        self._views: dict[tuple[int, bool], RemoteObject] = {}

    def request(self, operation: str, target: str | int, /, *args: Any, **kwargs: Any) -> Any:
        return self._request(operation, target, args, kwargs, False)

    def change(self, target: str | int, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function that may change its arguments."""
        return self._request("call", target, args, kwargs, True)

    def _request(self, operation: str, target: str | int, args: Any, kwargs: dict[str, Any], changing: bool) -> Any:
        if self.dry:
            self.asked += 1
            self.lost = True
            raise SolutionLostError("there is no solution")
        nodes = Nodes()

        def make_ref(value: Any) -> dict[str, Any]:
            if self.classes.get(type(value).__name__) is type(value):
                return nodes.add(value)
            if isinstance(value, Iterator) and not isinstance(value, RemoteObject):
                return {"iterator": [pack(v, make_ref) for v in itertools.islice(value, _MAX_ELEMENTS)]}
            return _ref_of(value)

        packed = [pack(a, make_ref) for a in args], {k: pack(v, make_ref) for k, v in kwargs.items()}
        payload = [self._number, operation, target, *packed, nodes.pack(make_ref), changing]
        reply = self._exchange(json.dumps(payload).encode() + b"\n")
        self.calls += operation == "call"
        try:
            printed = str(reply[-1])
            if reply[1] == "ok":
                value = self._receive(reply, args, kwargs if changing else {}, changing)
                # A mere reference says nothing yet about the solution.
                self.asked += operation == "call" or not isinstance(value, RemoteObject)
                error = None
            else:
                self.asked += 1
                _, _, name, message, _ = reply
                error = _error(name, message)
        except (Exception, MemoryError) as e:
            raise self._lose("it sent what is no reply") from e
        if printed:
            sys.stdout.write(printed)
        if isinstance(error, SolutionError):
            self._note(f"it raised {name}")
        if error is not None:
            raise error
        return value

    def _receive(self, reply: Any, args: Any, kwargs: dict[str, Any], changing: bool) -> Any:
        _, _, content, changed, nodes, _ = reply
        resolve_ref = unpack_nodes(nodes, self.classes, self._resolve_ref)
        value = unpack(content, resolve_ref)
        if type(value) in (bool, int, float, complex):
            self.numbers.append(value)
        for key, after in changed.items() if changing else ():
            _update_in_place(kwargs[key] if key in kwargs else args[int(key)], unpack(after, resolve_ref))
        return value

    def _exchange(self, request: bytes) -> Any:
        """Returns the reply to a request; every reply has the number of its request."""
        if self.lost:
            raise SolutionLostError("the solution does not answer")
        try:
            if not self.loaded and self._read() != "loaded":
                raise self._lose("it spoke out of turn")
            self.loaded = True
            self._requests.write(request)
            reply = self._read()
        except OSError as e:
            raise self._lose() from e
        if not isinstance(reply, list) or reply[:1] != [self._number]:
            raise self._lose("it spoke out of turn")
        self._number += 1
        return reply

    def _read(self) -> Any:
        try:
            line = self._replies.readline(_MAX_REPLY)
            if not line.endswith(b"\n"):
                raise self._lose()  # it has ended, or its reply is too long
            return json.loads(line)
        except (ValueError, RecursionError, MemoryError) as e:
            raise self._lose("it sent what is no reply") from e

    def _lose(self, strange: str = "") -> SolutionLostError:
        self.lost = True
        self._note(strange)
        return SolutionLostError("the solution does not answer")

    def _note(self, strange: str) -> None:
        if strange and strange not in self.strange:
            self.strange.append(strange)

    def _resolve_ref(self, kind: str, ref: Any) -> Any:
        if kind == "builtin":
            return BuiltinType(BUILTINS[ref])
        if kind == "await":
            return self._await(int(ref))
        return RemoteIterator(self, int(ref)) if kind == "iterate" else self.view({"ref": int(ref)}[kind], False)

    def view(self, target: int, tested: bool) -> "RemoteObject":
        """Returns the stand-in of an object; there is one of each, so that tests may ask whether two are the same."""
        return self._views.setdefault((target, tested), RemoteObject(self, target, tested))

    async def _await(self, target: int) -> Any:
        return self.request("await", target)


class BuiltinType:
    """A builtin class that the solution returned: it may be compared, but has no methods that tests could call."""

    def __init__(self, kind: type) -> None:
        self._kind, self.__name__ = kind, kind.__name__

    def __eq__(self, other: object) -> bool:
        return (other._kind if isinstance(other, BuiltinType) else other) is self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return repr(self._kind)


class RemoteObject:
    """A name of the solution, or an object in its process.

    Only data can be compared, so comparing this raises: the solution must not say itself whether it is right. Classes
    that the tests name and their instances are what is `tested`, so all their methods may be called.
    """

    def __init__(self, connection: SolutionConnection, target: str | int, tested: bool = False) -> None:
        tested = tested or (isinstance(target, str) and target.lstrip("_")[:1].isupper())
        self.__dict__.update(_connection=connection, _target=target, _tested=tested, _asked=0)

    def _request(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._connection.request(operation, self._target, *args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._made(self._request("call", *args, **kwargs))

    def _change(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._made(self._connection.change(self._target, *args, **kwargs))

    def _made(self, value: Any) -> Any:
        makes_instances = self._tested and isinstance(self._target, str)
        return self._connection.view(value._target, True) if makes_instances and type(value) is RemoteObject else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _DESCRIBING:
            raise AttributeError(name)
        value = self._request("getattr", name)
        if isinstance(value, RemoteObject) and name in _METHODS_OF_DATA and not self._tested:
            raise SolutionError(f"{name}() of an object that the solution returned would decide about it")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._request("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._request("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._request("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._request("delitem", key)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._request("iter")
        return iterator

    def __contains__(self, value: Any) -> bool:
        if self._tested:
            return self._request("contains", value) is True
        return value in list(self)

    def __len__(self) -> int:
        return int(self._request("len"))

    def __bool__(self) -> bool:
        return self._request("bool") is True

    def __str__(self) -> str:
        return str(self._request("str"))

    def __repr__(self) -> str:
        return str(self._request("repr"))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._request("isinstance", value) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, RemoteObject) and self._request("issubclass", value) is True

    def __enter__(self) -> Any:
        value = self._request("enter")
        self.__dict__["_asked"] = self._connection.asked
        return value

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        """Swallows an exception that the tests raise on purpose, but no verdict and no answer of its own."""
        on_purpose = error is not None and self._connection.asked == self._asked and _is_raised_on_purpose(error, trace)
        swallowed = self._request("exit", error is None or type(error).__name__, str(error)[:1000])
        return on_purpose and swallowed is True

    def __eq__(self, other: object) -> bool:
        if other is None or other is self:
            return other is self
        raise SolutionError("objects of the solution cannot be compared, only data can")

    def __hash__(self) -> int:
        return hash(self._target)

    def __deepcopy__(self, _: Any) -> "RemoteObject":
        return self


class RemoteIterator(RemoteObject):
    """An iterator of the solution; its elements are read as data, more and more at a time."""

    def __init__(self, connection: SolutionConnection, target: int) -> None:
        super().__init__(connection, target)
        self.__dict__.update(_buffer=deque(), _count=1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._buffer:
            self._buffer.extend(self._request("take", self._count))
            self.__dict__["_count"] = min(2 * self._count, _MAX_TAKEN)
            if not self._buffer:
                raise StopIteration
        return self._buffer.popleft()


def changing(function: Any) -> Any:
    """Returns the function; one of the solution's may then change its arguments."""
    return function._change if isinstance(function, RemoteObject) else function


@contextlib.contextmanager
def edit(owner: Any, name: str) -> Iterator[Any]:
    """Gives the data of an attribute to be changed in place, and sends them back to an object of the solution's."""
    data = getattr(owner, name)
    yield data
    if isinstance(owner, RemoteObject) and not isinstance(data, RemoteObject):
        setattr(owner, name, data)


def type_of(value: Any) -> Any:
    """Returns the type of a value; that of an object of the solution is the solution's."""
    if not isinstance(value, RemoteObject):
        return type(value)
    kind = value._request("type")
    return value._connection.named.get(kind.__name__, kind)


def doc_of(value: Any) -> Any:
    """Returns the docstring of a value, the solution's if it is an object of the solution."""
    return value._request("getattr", "__doc__") if isinstance(value, RemoteObject) else value.__doc__


def _is_raised_on_purpose(error: BaseException, trace: Any) -> bool:
    if isinstance(error, AssertionError | SolutionError | SolutionLostError):
        return False
    while trace.tb_next:
        trace = trace.tb_next
    instructions = {i.offset: i.opname for i in dis.get_instructions(trace.tb_frame.f_code)}
    return instructions.get(trace.tb_lasti) == "RAISE_VARARGS"


def _ref_of(value: Any) -> dict[str, Any]:
    if isinstance(value, RemoteObject):
        return {"ref": value._target}
    if isinstance(value, BuiltinType) or _is_builtin(value):
        return {"builtin": value.__name__}
    return {"opaque": type(value).__name__}  # the solution gets an object without attributes


def _is_builtin(value: Any) -> bool:
    return BUILTINS.get(getattr(value, "__name__", "")) is value


def _error(name: Any, message: Any) -> Exception:
    """Returns the builtin exception of that name, or a SolutionError in place of one that tests must not see."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_RAISED):
        try:
            return kind(message)
        except TypeError:  # it needs other arguments
            pass
    return SolutionError(f"{name}: {message}")


def _update_in_place(old: Any, new: Any) -> None:
    """Repeats a change that the solution made to an argument."""
    if isinstance(old, list | bytearray) and type(new) in (list, bytearray):
        old[:] = new
    elif isinstance(old, dict | set) and isinstance(new, type(old)):
        old.clear()
        old.update(new)
    elif type(old) is type(new) and hasattr(old, "__dict__"):
        vars(old).clear()
        vars(old).update(vars(new))
    else:
        raise TypeError("an immutable argument was changed")
