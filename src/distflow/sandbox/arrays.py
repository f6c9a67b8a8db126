"""Comparisons of arrays in tests: without them, an empty answer is close to everything, and a scalar to all its copies.

numpy repeats the smaller operand, and calls it equal if there is nothing to compare. Here an answer must have as many
elements as what it is compared with; only a number of the tests' own stands for many.
"""

import operator
import sys
from collections.abc import Callable, Collection
from typing import Any

_COMPARING = ("allclose", "isclose", "array_equiv", "equal", "not_equal", "subtract")
_TESTING = (
    "assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "assert_array_equal", "assert_equal",
)  # fmt: skip


class Arrays:
    """Guards the comparisons of numpy; `answers` are the numbers that the solution returned."""

    def __init__(self, answers: Collection[Any]) -> None:
        self._answers = answers
        self._guarded: set[int] = set()

    def guard(self) -> None:
        """Replaces the functions of numpy that compare, once the tests have imported it."""
        numpy = sys.modules.get("numpy")
        for module, names in ((numpy, _COMPARING), (getattr(numpy, "testing", None), _TESTING)):
            for name in names if module is not None and id(module) not in self._guarded else ():
                setattr(module, name, self._comparing(getattr(module, name)))
            self._guarded.add(id(module))

    def operate(self, name: str, left: Any, right: Any) -> Any:
        """Applies an operator, of the module `operator`."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and (isinstance(left, numpy.ndarray) or isinstance(right, numpy.ndarray)):
            self._check(left, right)
        return getattr(operator, name)(left, right)

    def _comparing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def compare(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
            self._check(left, right)
            return function(left, right, *args, **kwargs)

        return compare

    def _check(self, left: Any, right: Any) -> None:
        sizes = [_size(left), _size(right)]
        if sizes[0] == sizes[1]:
            return
        own = [v for v in (left, right) if type(v) in (int, float) and not any(v is a for a in self._answers)]
        if not (own and min(sizes) == 1):
            raise AssertionError(f"{sizes[0]} elements are compared with {sizes[1]}")


def _size(value: Any) -> int:
    return int(sys.modules["numpy"].size(value))
