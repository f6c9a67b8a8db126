"""Plain data as JSON, the only thing that crosses between tests and the solution they test.

`pack` is lenient: it turns what a solution returns into data, a subclass of `int` into an `int`. `unpack` is strict: it
builds nothing but the types below, each of them exactly, so no method of a solution's class runs beside the tests.
"""

import collections
import datetime
import decimal
import fractions
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

_SAFE_INTEGER = 1 << 53  # larger ones are text, for which JSON has no limit on digits
_PLAIN = frozenset({type(None), bool, str, float})
_ORDERED: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "keys": lambda values: dict.fromkeys(values).keys(),
    "values": lambda values: dict(enumerate(values)).values(),
    "iterator": iter,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "OrderedDict": collections.OrderedDict,
    "items": lambda pairs: dict(pairs).items(),
}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": decimal.Decimal,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_NUMBERS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "range": range,
    "Fraction": fractions.Fraction,
    "timedelta": datetime.timedelta,
}
# Classes and functions without side effects, which travel by name.
_BUILTINS = {
    f.__name__: f
    for f in (
        *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, range),
        *(abs, all, any, chr, divmod, len, max, min, ord, pow, repr, reversed, round, sorted, sum),
    )
}
_NAMES_OF_BUILTINS = {id(f): name for name, f in _BUILTINS.items()}
_CONTAINERS: tuple[tuple[type, str], ...] = (
    (tuple, "tuple"),
    (set, "set"),
    (frozenset, "frozenset"),
    (collections.deque, "deque"),
    (type({}.keys()), "keys"),
    (type({}.values()), "values"),
)
_DICTS: tuple[tuple[type[dict[Any, Any]], str], ...] = (
    (collections.Counter, "Counter"),
    (collections.OrderedDict, "OrderedDict"),
    (dict, "dict"),
)
_ITEMS: type[Any] = type({}.items())
_DATES: tuple[tuple[type[datetime.date] | type[datetime.time], str], ...] = (
    (datetime.datetime, "datetime"),
    (datetime.date, "date"),
    (datetime.time, "time"),
)


def pack(value: Any, make_ref: Callable[[Any], Any]) -> Any:
    """Converts a value to JSON; `make_ref` replaces objects that are not data."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int and -_SAFE_INTEGER < value < _SAFE_INTEGER:
        return value
    if kind is list:
        return [pack(v, make_ref) for v in value]
    return _pack_other(value, make_ref)


def _pack_other(value: Any, make_ref: Callable[[Any], Any]) -> Any:
    def pack_each(values: Any) -> list[Any]:
        return [pack(v, make_ref) for v in values]

    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return pack_each(value)
    if isinstance(value, tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
        return {"namedtuple": [type(value).__name__, list(fields), pack_each(value)]}
    for kind, name in _DICTS:
        if isinstance(value, kind):
            return {name: [pack_each(pair) for pair in value.items()]}
    for kind, name in _CONTAINERS:
        if isinstance(value, kind):
            return {name: pack_each(value)}
    if type(value) is _ITEMS:
        return {"items": [pack_each(pair) for pair in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    return _pack_rare(value, make_ref)


def _pack_rare(value: Any, make_ref: Callable[[Any], Any]) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, fractions.Fraction):
        return {"Fraction": [pack(value.numerator, make_ref), pack(value.denominator, make_ref)]}
    if isinstance(value, decimal.Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    for kind, name in _DATES:
        if isinstance(value, kind):
            return {name: value.isoformat()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        content = pack(value.tolist(), make_ref)
        return {"array": [str(value.dtype), content]} if getattr(value, "shape", ()) else content
    builtin = _NAMES_OF_BUILTINS.get(id(value))
    return {"builtin": builtin} if builtin else make_ref(value)


def unpack(packed: Any, resolve_ref: Callable[[str, Any], Any]) -> Any:
    """Reverses `pack`; `resolve_ref` gets the kind and the content of whatever is not data."""
    if isinstance(packed, list):
        return [unpack(v, resolve_ref) for v in packed]
    if not isinstance(packed, dict):
        return packed

    def unpack_each(values: Any) -> Iterator[Any]:
        return (unpack(v, resolve_ref) for v in values)

    ((kind, content),) = packed.items()
    if kind in _ORDERED:
        return _ORDERED[kind](unpack_each(content))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((unpack(k, resolve_ref), unpack(v, resolve_ref)) for k, v in content)
    if kind in _TEXTS:
        return _TEXTS[kind](content)
    if kind in _NUMBERS:
        return _NUMBERS[kind](*unpack_each(content))
    if kind == "namedtuple":
        name, fields, values = content
        return _named_tuple(name, tuple(fields))(*unpack_each(values))
    if kind == "builtin":
        return _BUILTINS[content]
    if kind == "array":
        return _array(content[0], unpack(content[1], resolve_ref))
    return resolve_ref(kind, content)


@functools.lru_cache(64)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    return collections.namedtuple(name, fields)  # refuses what is not a name


def _array(dtype: str, values: Any) -> Any:
    """Builds an array if the tests use numpy, a list if they do not."""
    numpy = sys.modules.get("numpy")
    return numpy.array(values, dtype=dtype) if numpy and dtype.isalnum() else values
