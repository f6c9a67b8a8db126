"""The part of pytest that tests in data sets use: `raises`, `approx`, `mark.parametrize`, `fixture`."""

import io
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple


class Captured(NamedTuple):
    """The printed text."""

    out: str
    err: str


class raises:  # noqa: N801 (pytest's name)
    """Expects an exception in a `with` block, or of a call."""

    def __init__(
        self, expected: Any, function: Any = None, *args: Any, match: str | None = None, **kwargs: Any
    ) -> None:
        self.expected, self.match, self.value = expected, match, None
        if function is not None:
            with self:
                function(*args, **kwargs)

    def __enter__(self) -> "raises":
        return self

    def __exit__(self, kind: Any, error: Any, _: TracebackType | None) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.expected}")
        if not issubclass(kind, self.expected):
            return False
        if self.match is not None and not re.search(self.match, str(error)):
            raise AssertionError(f"{str(error)[:100]!r} does not match {self.match!r}")
        self.value = error
        return True


class approx:  # noqa: N801 (pytest's name)
    """A number, or a sequence or dict of numbers, that equals nearby values."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self.nan_ok = expected, nan_ok
        self.abs = 1e-12 if abs is None else abs
        self.rel = (1e-6 if abs is None else 0.0) if rel is None else rel

    def __eq__(self, other: object) -> bool:
        return self._near(other, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            same_keys = isinstance(value, Mapping) and value.keys() == expected.keys()
            return same_keys and all(self._near(value[k], e) for k, e in expected.items())
        if isinstance(expected, Sequence) and not isinstance(expected, str):
            same_length = isinstance(value, Sequence) and len(value) == len(expected)
            return same_length and all(map(self._near, value, expected))
        if not isinstance(expected, int | float) or not isinstance(value, int | float):
            return bool(value == expected)
        if math.isnan(expected):
            return self.nan_ok and math.isnan(value)
        return value == expected or math.isclose(value, expected, rel_tol=self.rel, abs_tol=self.abs)


class _Mark:
    """`mark.parametrize` adds parameters to a function; any other mark does nothing."""

    def parametrize(self, names: str | Sequence[str], values: Sequence[Any], **_: Any) -> Callable[[Any], Any]:
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        rows = [dict(zip(keys, v if len(keys) > 1 else [v], strict=True)) for v in values]

        def decorate(function: Any) -> Any:
            function.parameter_rows = [*getattr(function, "parameter_rows", []), rows]
            return function

        return decorate

    def __getattr__(self, _: str) -> Callable[..., Any]:
        def decorate(*args: Any, **__: Any) -> Any:
            return args[0] if args and callable(args[0]) else lambda function: function

        return decorate


mark = _Mark()


def fixture(function: Any = None, autouse: bool = False, **_: Any) -> Any:
    """Marks a function whose value tests get by the name of a parameter."""
    if function is None:
        return lambda function: fixture(function, autouse)
    function.fixture, function.autouse = function, autouse
    return function


class CapturedOutput:
    """The fixture `capsys`: what tests print, and what the solution prints when they call it."""

    def __enter__(self) -> "CapturedOutput":
        self._before = sys.stdout, sys.stderr
        self.readouterr()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before

    def readouterr(self) -> Captured:
        texts = [s.getvalue() if isinstance(s, io.StringIO) else "" for s in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return Captured(*texts)


def param(*values: Any, **_: Any) -> Any:
    return values if len(values) > 1 else values[0]


def fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def skip(reason: str = "", **_: Any) -> None:
    raise AssertionError(f"the test skips itself: {reason}")


def main(*_: Any, **__: Any) -> int:
    """Does nothing: test functions run anyway."""
    return 0


def parameter_sets(function: Any) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each run of a test function."""
    for rows in itertools.product(*getattr(function, "parameter_rows", [])):
        yield {k: v for row in rows for k, v in row.items()}
