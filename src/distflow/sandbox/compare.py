"""Compares the output of a solution with the expected one; both are data."""

import math
from decimal import Decimal, InvalidOperation
from typing import Any

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # for numbers that are not whole


def same(value: Any, expected: Any) -> bool:
    """Returns whether a value is the expected one, which is written in JSON.

    JSON has no tuples and no numbers as keys, so a list equals a tuple and the key 1 the key "1". NaN equals NaN, and
    fractions match to six digits.
    """
    if isinstance(value, tuple | list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        keys = {str(k): k for k in value}
        return keys.keys() == expected.keys() and all(same(value[keys[k]], e) for k, e in expected.items())
    if isinstance(expected, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return _close(value, expected)
    return type(value) in (bool, int, float, str, type(None), complex) and bool(value == expected)


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two texts have the same lines; whitespace at the ends is ignored, numbers match as numbers."""
    lines, expected_lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words, expected_words = line.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_number, words, expected_words))


def _same_number(word: str, expected: str) -> bool:
    try:
        number, target = Decimal(word), Decimal(expected)
    except InvalidOperation:
        return False
    if not (number.is_finite() and target.is_finite()):
        return word == expected
    return number == target or (target != target.to_integral_value() and _close(float(number), float(target)))


def _close(value: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(value)
    try:
        return math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer beyond floats
        return False
