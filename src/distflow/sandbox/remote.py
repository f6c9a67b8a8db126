"""Stand-ins, beside the tests, for what is in the solution's process."""

import builtins
import itertools
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from distflow.sandbox.wire import pack, unpack

_MAX_REPLY = 1 << 26  # bytes
_MAX_TAKEN = 1024  # elements of an iterator that are read at once
_MAX_ELEMENTS = 1_000_000  # of an iterator that is an argument
# These steer the interpreter, so they would end loops of the tests.
_NOT_RAISED = (StopIteration, StopAsyncIteration)


class SolutionLostError(BaseException):
    """The solution exited, or its time is up. A BaseException, so that no `except Exception` of a test hides it."""


class SolutionError(Exception):
    """The solution raised or returned something that tests must not see as it is, such as `SystemExit`."""


class SolutionConnection:
    """Sends requests to the solution's process; `lost` stays true whatever the tests catch."""

    def __init__(self) -> None:
        self._replies, self._requests = open(3, "rb"), open(4, "wb", buffering=0)  # noqa: SIM115
        self.loaded = self.lost = False
        self.calls = 0  # that were answered
        self.asked = 0  # those, and other questions that were answered with a value
        self._number = 0  # of requests
        self.strange: list[str] = []  # what no honest program does

    def request(self, operation: str, target: str | int, *args: Any, **kwargs: Any) -> Any:
        payload = [
            self._number,
            operation,
            target,
            [pack(a, _ref_of) for a in args],
            {k: pack(v, _ref_of) for k, v in kwargs.items()},
        ]
        reply = self._exchange(json.dumps(payload).encode() + b"\n")
        self.calls += operation == "call"
        try:
            if reply[1] == "ok":
                value = unpack(reply[2], self._resolve_ref)
                for key, content in reply[3].items():
                    _update_in_place(
                        kwargs[key] if key in kwargs else args[int(key)], unpack(content, self._resolve_ref)
                    )
                # A mere reference says nothing yet about the solution.
                self.asked += operation == "call" or not isinstance(value, RemoteObject)
                return value
            self.asked += 1
            _, _, name, message = reply
            error = _error(name, message)
        except Exception as e:
            raise self._lose("it sent what is no reply") from e
        if isinstance(error, SolutionError):
            self._note(f"it raised {name}")
        raise error

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
        line = self._replies.readline(_MAX_REPLY)
        if not line.endswith(b"\n"):
            raise self._lose()  # it has ended, or its reply is too long
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as e:
            raise self._lose("it sent what is no reply") from e

    def _lose(self, strange: str = "") -> SolutionLostError:
        self.lost = True
        self._note(strange)
        return SolutionLostError("the solution does not answer")

    def _note(self, strange: str) -> None:
        if strange and strange not in self.strange:
            self.strange.append(strange)

    def _resolve_ref(self, kind: str, ref: Any) -> "RemoteObject":
        return {"ref": RemoteObject, "iterate": RemoteIterator}[kind](self, int(ref))


class RemoteObject:
    """A name of the solution, or an object in its process.

    Only data can be compared, so comparing this raises: the solution must not say itself whether it is right.
    """

    def __init__(self, connection: SolutionConnection, target: str | int) -> None:
        self.__dict__.update(_connection=connection, _target=target, __name__=str(target))

    def _request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return self._connection.request(operation, self._target, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._request("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._request("getattr", name)

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
        return value in list(self)

    def __len__(self) -> int:
        return int(self._request("len"))

    def __bool__(self) -> bool:
        return self._request("bool") is True

    def __str__(self) -> str:
        return str(self._request("str"))

    def __repr__(self) -> str:
        return str(self._request("repr"))

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


def _ref_of(value: Any) -> dict[str, Any]:
    if isinstance(value, Iterator) and not isinstance(value, RemoteObject):
        return {"iterator": [pack(v, _ref_of) for v in itertools.islice(value, _MAX_ELEMENTS)]}
    if isinstance(value, RemoteObject) and isinstance(value._target, int):
        return {"ref": value._target}
    return {"opaque": type(value).__name__}  # the solution gets an object without attributes


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
    else:
        raise TypeError("an immutable argument was changed")
