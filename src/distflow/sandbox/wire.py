"""Plain data as JSON, the only thing that crosses between tests and the solution they test.

`pack` is lenient: it turns what a solution returns into data, a subclass of `int` into an `int`. `unpack` is strict: it
builds nothing but the types below, each of them exactly, so no method of a solution's class runs beside the tests.
Objects of classes that both sides have, such as the nodes of a tree, travel as their attributes (`Nodes`).
"""

import builtins
import collections
import datetime
import decimal
import enum
import fractions
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_NAMED: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, range),
    *(abs, all, any, chr, divmod, len, max, min, ord, pow, repr, reversed, round, sorted, sum),
    *(e for e in vars(builtins).values() if isinstance(e, type) and issubclass(e, Exception)),
)
BUILTINS: dict[str, Any] = {f.__name__: f for f in _NAMED}
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
        shape = list(getattr(value, "shape", ()))
        return {"array": [str(value.dtype), content, shape]} if shape else content
    return make_ref(value)


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
        unpacked = list(unpack_each(values))
        if any(map(callable, unpacked)):
            raise TypeError("a field of a named tuple would be called as its method")
        return _named_tuple(name, tuple(fields))(*unpacked)
    if kind == "array":
        return _array(content[0], unpack(content[1], _refuse), content[2])
    return resolve_ref(kind, content)


class Nodes:
    """Packs the objects of one message that are of classes which both sides have; one may refer to another."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}  # by the identity of an object

    def add(self, value: Any) -> dict[str, int]:
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return {"node": number}

    def pack(self, make_ref: Callable[[Any], Any]) -> list[Any]:
        """Returns the class and the attributes of each; packing one may add others, in a chain of any length."""
        packed: list[Any] = []
        while len(packed) < len(self._values):
            value = self._values[len(packed)]
            packed.append([type(value).__name__, {k: pack(v, make_ref) for k, v in _attributes(value).items()}])
        return packed


def unpack_nodes(
    packed: Sequence[Any], classes: Mapping[str, type], resolve_ref: Callable[[str, Any], Any]
) -> Callable[[str, Any], Any]:
    """Builds the objects of a message without running any code of theirs; returns a `resolve_ref` that knows them.

    Refuses attributes that would hide a method of the class, which decides what its objects do.
    """
    nodes = [_bare(classes[name], attributes) for name, attributes in packed]

    def resolve(kind: str, content: Any) -> Any:
        return nodes[content] if kind == "node" else resolve_ref(kind, content)

    for node, (_, attributes) in zip(nodes, packed, strict=True):
        if isinstance(node, enum.Enum):
            continue
        for name, value in attributes.items():
            known = getattr(type(node), name, None)
            if name.startswith("__") or callable(known) or isinstance(known, property):
                raise TypeError(f"the attribute {name!r} would hide what its class defines")
            object.__setattr__(node, name, unpack(value, resolve))
    return resolve


def _bare(kind: type, attributes: Mapping[str, Any]) -> Any:
    return kind[attributes["_name_"]] if issubclass(kind, enum.Enum) else object.__new__(kind)


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, enum.Enum):
        return {"_name_": value.name}
    slots = {n for k in type(value).__mro__ for n in _texts(k.__dict__.get("__slots__", ())) if n[:2] != "__"}
    return {n: getattr(value, n) for n in sorted(slots) if hasattr(value, n)} | dict(getattr(value, "__dict__", {}))


def _texts(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _refuse(kind: str, _: Any) -> Any:
    raise TypeError(f"an array holds numbers and text, not {kind!r}")


@functools.lru_cache(64)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    return collections.namedtuple(name, fields)  # refuses what is not a name


def _array(dtype: str, values: Any, shape: Sequence[int]) -> Any:
    """Builds an array if the tests use numpy, a list if they do not."""
    numpy = sys.modules.get("numpy")
    return numpy.array(values, dtype=dtype).reshape(shape) if numpy and dtype.isalnum() else values
