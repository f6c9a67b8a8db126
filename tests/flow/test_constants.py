"""Constants are typed by annotations, else by defaults; an error names the constant, the value and what it takes."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import Field

from distflow.errors import FlowError
from distflow.flow.constants import check_constant

if TYPE_CHECKING:
    from nowhere import Thing  # type: ignore[import-not-found]


def function(
    real=1.0,
    whole=1,
    flag=False,
    text="a",
    nothing=None,
    items=(),
    *,
    number: float = 1,
    quoted: "float | None" = None,
    kind: Literal["std", "none"] = "std",
    maybe: Literal["std", "none"] | None = None,
    limited: Annotated[float, Field(ge=0, le=1)] = 0.5,
    pair: tuple[float, float] = (0.9, 0.95),
    thing: "Thing" = None,
    anything: Any = 1,
    own: object = None,
    **rest,
): ...


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("real", [0.5, 1, -3]),
        ("whole", [2, -1]),
        ("flag", [True, False]),
        ("text", ["b", ""]),
        ("nothing", [1, "a", None, [1]]),
        ("items", [[1], "a"]),
        ("number", [0.5, 2]),
        ("quoted", [0.5, None]),
        ("kind", ["std", "none"]),
        ("maybe", ["none", None]),
        ("limited", [0, 1, 0.3]),
        ("pair", [[0.1, 1]]),
        ("thing", [1, "a"]),
        ("anything", [1, "a"]),
        ("own", [1, "a"]),
        ("unknown", [1, "a"]),
    ],
)
def test_what_fits_is_accepted(name: str, values: list[object]) -> None:
    for value in values:
        check_constant(function, name, value, name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("real", "hello", "algo.x: 'hello' is not a number"),
        ("real", True, "algo.x: True is not a number"),
        ("real", None, "algo.x: None is not a number"),
        ("real", float("nan"), "algo.x: nan: input should be a finite number"),
        ("whole", 0.5, "algo.x: 0.5 is not an integer"),
        ("flag", 1, "algo.x: 1 is not true or false"),
        ("text", 1, "algo.x: 1 is not text"),
        ("quoted", "x", "algo.x: 'x' is not a number or none"),
        ("kind", "sdt", "algo.x: 'sdt' is not one of std, none; did you mean 'std'?"),
        ("maybe", "sdt", "algo.x: 'sdt' is not one of std, none or none; did you mean 'std'?"),
        ("limited", 2, "algo.x: 2: input should be less than or equal to 1"),
        ("pair", [1], "algo.x: [1] is not a tuple[float, float]"),
        ("nothing", {1, 2}, "algo.x is a set; constants are plain JSON values"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(name: str, value: object, message: str) -> None:
    with pytest.raises(FlowError) as e:
        check_constant(function, name, value, "algo.x")
    assert str(e.value) == message
