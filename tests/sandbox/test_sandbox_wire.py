# ruff: noqa: E501 (tables)
"""Data crosses between tests and solution unchanged, and nothing but data crosses."""

import collections
import datetime
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.sandbox.compare import same, same_output
from distflow.sandbox.wire import Nodes, pack, unpack, unpack_nodes


def refuse(*_: Any) -> Any:
    raise TypeError("not data")


def cross(value: Any) -> Any:
    return unpack(json.loads(json.dumps(pack(value, refuse))), refuse)


class Node:
    def __init__(self, val: Any, other: Any = None) -> None:
        self.val, self.other = val, other

    def is_right(self) -> bool:
        return bool(self.val == 3)


def cross_nodes(*values: Any) -> list[Any]:
    nodes = Nodes()
    packed = [pack(v, nodes.add) for v in values]
    arrived = json.loads(json.dumps([packed, nodes.pack(nodes.add)]))
    resolve = unpack_nodes(arrived[1], {"Node": Node}, refuse)
    return [unpack(v, resolve) for v in arrived[0]]


def test_objects_of_known_classes_arrive_as_their_attributes() -> None:
    first = Node(1, Node([2, (3,)]))
    first.other.other = first
    (a, b, c) = cross_nodes(first, first.other, [first])
    assert (a.val, b.val, type(b)) == (1, [2, (3,)], Node)
    assert a.other is b
    assert b.other is a
    assert c == [a]


def test_chains_of_objects_may_be_long() -> None:
    node = None
    for i in range(20_000):
        node = Node(i, node)
    (arrived,) = cross_nodes(node)
    assert arrived.other.other.val == 19_997


def test_an_attribute_cannot_take_the_place_of_a_method() -> None:
    node = Node(4)
    for name in ("is_right", "__eq__", "__class__"):
        vars(node)[name] = 3
        with pytest.raises(TypeError, match="hide"):
            cross_nodes(node)
        del vars(node)[name]
    assert not cross_nodes(node)[0].is_right()


def test_fields_of_named_tuples_are_no_methods() -> None:
    packed = {"namedtuple": ["P", ["startswith"], [{"ref": 0}]]}
    with pytest.raises(TypeError, match="called as its method"):
        unpack(packed, lambda *_: bool)


HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.fractions() | st.decimals(allow_nan=False) | st.dates() | st.datetimes() | st.timedeltas() | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
DATA = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(DATA)
def test_data_arrives_as_it_was(value: Any) -> None:
    arrived = cross(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_other_kinds_of_data() -> None:
    point = collections.namedtuple("point", "x y")
    values = [
        range(2, 9, 3),
        collections.deque([1]),
        collections.Counter("aab"),
        bytearray(b"x"),
        point(1, 2),
    ]
    for value in values:
        assert cross(value) == value
    assert cross({"a": 1}.keys()) == {"a"}
    assert list(cross({"a": 1}.items())) == [("a", 1)]
    assert cross(collections.defaultdict(int, a=1)) == {"a": 1}


def test_subclasses_arrive_as_their_base() -> None:
    class Anything(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert type(cross(Anything(4))) is int
    assert cross([Anything(4)]) != [5]


@pytest.mark.parametrize(
    "packed",
    [
        {"builtin": "eval"}, {"builtin": "open"}, {"ref": 0}, {"iterate": 0}, {"unknown": 1}, {"tuple": 1},
        {"int": "zz", "str": 1}, {"int": "zz"}, {"namedtuple": ["A", ["x y"], [1]]}, {"namedtuple": ["A", ["_x"], [1]]},
        {"Fraction": [1, 0]}, {"set": [[1]]}, {"dict": [[1]]}, {"Decimal": "x"},
    ],
)  # fmt: skip
def test_what_is_not_data_is_refused(packed: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError, ArithmeticError)):
        unpack(packed, refuse)


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (3, 3, True), (3.0, 3, True), (True, True, True), ("3", 3, False), (None, None, True), ((1, [2]), [1, [2]], True),
        ([1, 2], [1, 2, 3], False), ({1: "a"}, {"1": "a"}, True), ({1: "a"}, {"1": "b"}, False), ({1}, [1], False),
        (float("nan"), float("nan"), True), (float("inf"), float("inf"), True), (0.1 + 0.2, 0.3, True), (0.31, 0.3, False),
        (10**400, 1.5, False), (float("nan"), 1.0, False), (object(), None, False), ([], {}, False),
        (Fraction(1, 2), 0.5, False), (Decimal(1), 1, False), (datetime.date(1, 1, 1), "0001-01-01", False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json_means_them(value: Any, expected: Any, equal: bool) -> None:
    assert same(value, expected) is equal


@pytest.mark.parametrize(
    ("printed", "expected", "equal"),
    [
        ("3\n", "3", True), ("3 \n\n", "3", True), ("3", "4", False), ("", "0", False), ("1 2", "1\n2", False),
        ("0.3333333", "0.333333333", True), ("0.33", "0.3333", False), ("2", "2.000", True), ("yes 1.0", "yes 1", False),
        ("nan", "nan", True), ("inf", "1e999", False), ("1", "1.0000001", True), ("1.0000001", "1", False), (" x", "x", False),
    ],
)  # fmt: skip
def test_output_is_compared_by_lines_and_numbers(printed: str, expected: str, equal: bool) -> None:
    assert same_output(printed, expected) is equal


def test_a_line_with_more_or_fewer_numbers_is_another_output() -> None:
    assert same_output("1.0 2", "1 2.0")
    assert not same_output("1.0", "1 2.0")
    assert not same_output("1.0 2 3", "1 2.0")
