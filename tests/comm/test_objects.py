"""Python objects keep value and type in every encoding."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.comm.objects import KINDS, decode, encode

SCALARS = st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
OBJECTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
COLUMNS = st.one_of(
    *(
        st.lists(s, min_size=1, max_size=8)
        for s in (st.text(), st.integers(), st.floats(allow_nan=False), st.booleans())
    ),
    st.lists(OBJECTS, min_size=1, max_size=8),
)


def typed(value: Any) -> Any:
    """Adds the type: 1, 1.0 and True are equal without it."""
    if isinstance(value, list):
        return [typed(v) for v in value]
    if isinstance(value, dict):
        return {k: typed(v) for k, v in value.items()}
    return type(value), repr(value)


@settings(deadline=None)
@given(COLUMNS, COLUMNS)
def test_columns_that_two_workers_encoded_are_read_as_one(mine: list[Any], theirs: list[Any]) -> None:
    parts = [encode(mine), encode(theirs)]
    memory = np.concatenate([data for _, data, _ in parts])
    lengths = np.concatenate([n for _, _, n in parts])
    kinds = np.repeat([KINDS.index(kind) for kind, _, _ in parts], [len(mine), len(theirs)])
    rows = decode(memory, np.cumsum(lengths) - lengths, lengths, kinds)
    assert [typed(r) for r in rows] == [typed(r) for r in (*mine, *theirs)]


def test_each_column_gets_the_most_compact_encoding() -> None:
    assert [encode(c)[0] for c in ([0.5], [3], [True], ["a"], [1, 2.0], [10**30])] == [
        "float",
        "int",
        "bool",
        "text",
        "json",
        "json",
    ]
