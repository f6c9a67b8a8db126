"""Learning curves: points from a log, as SVG and as text."""

import json
import math
import random
import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from distflow.errors import DataError
from distflow.observe.curve import read, svg, terminal

SVG = "{http://www.w3.org/2000/svg}"

Points = list[tuple[float, float]]


def write(folder: Path, *records: dict[str, object], tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return path


def rising(n: int, noise: float = 0.0, every: int = 1) -> Points:
    chance = random.Random(n)
    return [(i, 0.7 - 0.6 * math.exp(-i / 50) + chance.gauss(0, noise)) for i in range(-1, n, every)]


def texts(picture: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def extent(t: ElementTree.Element) -> tuple[float, float, float, float]:
    """Left, right, top and bottom, for letters of an even 0.6 of their size."""
    size, x, y = float(t.attrib["font-size"]), float(t.attrib["x"]), float(t.attrib["y"])
    width = cell_len(t.text or "") * size * 0.6
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[t.get("text-anchor", "start")] * width
    return left, left + width, y - 0.8 * size, y + 0.2 * size


numbers = st.floats() | st.floats(0, 1) | st.integers(-3, 3).map(float)
point = st.tuples(st.integers(-1, 500) | numbers, numbers)
points = st.lists(point, max_size=12) | st.lists(point, min_size=30, max_size=50)  # the long ones may be smoothed
names = st.text(max_size=60)
curves = st.dictionaries(names, points, max_size=9)


@settings(max_examples=60, deadline=None)
@given(curves, names, names, names, st.booleans(), st.data())
def test_any_picture_is_sound(
    series: dict[str, Points], title: str, x: str, y: str, percent: bool, data: st.DataObject
) -> None:
    headline = data.draw(st.sampled_from([None, *series]))
    picture = svg(title, series, x, y, headline=headline, percent=percent)
    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = [extent(t) for t in root.iter(f"{SVG}text")]
    for left, right, top, bottom in found:
        assert left >= 0
        assert right <= width
        assert top >= 0
        assert bottom <= height
    for e in root.iter():
        for key in ("d", "x", "y", "cx", "cy"):
            assert not re.search("nan|inf", e.get(key, ""))
        for pair in re.findall(r"[ML]([^MLHhv]+)", e.get("d", "")):
            px, py = map(float, pair.split(","))
            assert 0 <= px <= width
            assert 0 <= py <= height
    assert picture == svg(title, series, x, y, headline=headline, percent=percent)


@settings(max_examples=40, deadline=None)
@given(st.lists(points, min_size=1, max_size=24))
def test_no_label_lies_on_another(many: list[Points]) -> None:
    root = ElementTree.fromstring(svg("many", {f"run {i}": p for i, p in enumerate(many)}))
    assert sum((t.text or "").startswith("run") for t in root.iter(f"{SVG}text")) == len(many)
    apart(root)


def test_long_numbers_do_not_lie_on_another() -> None:
    series: dict[str, Points] = {"name" * 9: [(123456.789 + i / 10_000, i) for i in range(8)]}
    apart(ElementTree.fromstring(svg("", series)))
    assert "123456.7890 " in terminal(series)


def apart(root: ElementTree.Element) -> None:
    for a, b in combinations([extent(t) for t in root.iter(f"{SVG}text")], 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]


@settings(max_examples=60, deadline=None)
@given(curves, st.integers(1, 120), st.integers(0, 30), names, st.booleans())
def test_text_keeps_to_its_width(series: dict[str, Points], width: int, height: int, x: str, percent: bool) -> None:
    text = terminal(series, width, height, x, percent=percent)
    lines = text.removesuffix("\n").split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert max(height, 2) + 2 + len(series) <= len(lines) <= max(height, 2) + 3 + len(series)
    assert not re.search(r"\b(nan|inf)\b", "".join(lines[: max(height, 2)]))


def test_points_of_a_metric_that_is_seldom_there(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"step": -1, "time": 1.5, "val/accuracy": 0.25},
        {"step": 0, "time": 2.5, "loss": 2, "val/accuracy": None},
        {"step": 1, "time": 3.5, "loss": 1.5},
        {"step": 2, "time": 4.5, "loss": None, "val/accuracy": 0.5},
        tail='{"step": 3, "time": 5.5, "lo',
    )
    assert read(path, "val/accuracy") == {"val/accuracy": [(-1, 0.25), (2, 0.5)]}
    assert read(path, "loss", "val/accuracy")["loss"] == [(0, 2.0), (1, 1.5)]
    assert set(read(path)) == {"loss", "val/accuracy"}


def test_the_last_word_on_a_step_counts(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 1, "a": 3.0, "b": 1e400})
    assert read(path) == {"a": [(1, 3.0), (2, 2.0)]}


def test_a_metric_without_a_point_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, {"step": 0, "time": 1.0, "val/accuracy": 0.5, "loss": 1.0, "never": None})
    with pytest.raises(DataError, match=r"no point of metric 'val/acuracy'; did you mean 'val/accuracy'\?"):
        read(path, "val/acuracy")
    with pytest.raises(DataError, match=r"'never'; known: loss, val/accuracy$"):
        read(path, "loss", "never")
    with pytest.raises(DataError, match=r"'time'; known"):
        read(path, "time")


def test_a_log_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "metrics.jsonl")
    for bad in ("{", "[1]", '{"loss": 1}', '{"step": null}'):
        path = write(tmp_path, tail=f'{{"step": 0, "a": 1}}\n{bad}\n{{"step": 1, "a": 1}}\n')
        with pytest.raises(DataError, match="line 2: not the metrics of a step"):
            read(path)
    assert read(write(tmp_path)) == {}
    with pytest.raises(DataError, match="there are none"):
        read(write(tmp_path), "loss")


def test_the_headline_tells_before_and_after() -> None:
    series = {"val/accuracy": [(-1, 0.123), (9, 0.4), (19, 0.56)], "other": [(0, 0.2), (19, 0.3)]}
    found = texts(svg("Run", series, y="accuracy", headline="val/accuracy", percent=True))
    assert {"Run", "accuracy", "step", "other"} <= set(found)
    assert {"val/accuracy: 12.3% → 56.0%", "12.3%", "56.0%  val/accuracy"} <= set(found)
    assert not any("→" in t for t in texts(svg("Run", series)))
    with pytest.raises(DataError, match="did you mean 'val/accuracy'"):
        svg("Run", series, headline="val/acc")


def test_percent_shows_the_whole_range() -> None:
    found = texts(svg("", {"a": [(0, 0.31), (1, 0.32)]}, percent=True))
    assert {"0%", "20%", "80%", "100%"} <= set(found)
    text = terminal({"a": [(0, 0.31), (1, 0.32)]}, percent=True)
    assert text.startswith("100% ┤")
    assert "\n  0% ┤" in text
    assert text.endswith("\na  31.0% → 32.0%\n")


def test_ticks_are_round() -> None:
    found = texts(svg("", {"a": [(0, 0.0), (300, 7e-4)]}))
    assert {"0", "50", "300", "0.0002", "0.0008"} <= set(found)
    found = texts(svg("", {"a": [(0, -1.0), (3, 5e7)]}, x=""))
    assert {"0", "1", "2", "3", "−1e7", "1e7", "5e7"} == set(found) - {"a", "2e7", "3e7", "4e7"}


def test_only_a_restless_series_is_smoothed() -> None:
    def paths(kind: str, series: dict[str, Points]) -> list[ElementTree.Element]:
        root = ElementTree.fromstring(svg("", series))
        return [p for p in root.iter(f"{SVG}path") if p.get("class") == kind]

    calm, noisy, few = {"a": rising(300)}, {"a": rising(300, 0.05)}, {"a": rising(300, 0.05, every=20)}
    assert not paths("dots", calm)
    assert paths("dots", noisy)[0].get("stroke-opacity")
    assert not paths("dots", few)[0].get("stroke-opacity")
    heights = [float(y) for y in re.findall(r",([\d.]+)", paths("line", noisy)[0].attrib["d"])]
    raw = [float(y) for y in re.findall(r",([\d.]+)", paths("dots", noisy)[0].attrib["d"])]
    assert len(raw) == len(heights) == 301
    assert wiggle(heights) < wiggle(raw) / 4
    assert any("moving mean of 25" in t for t in texts(svg("", noisy)))
    assert "(moving mean)" in terminal(noisy)
    assert "mean" not in svg("", calm | {"b": few["a"]})


def wiggle(values: list[float]) -> float:
    return sum(abs(b - a) for a, b in pairwise(values))


def test_a_long_run_is_a_small_picture_that_keeps_its_spikes() -> None:
    flat: Points = [(i, 9.0 if i == 54_321 else 1.0) for i in range(100_000)]
    picture = svg("", {"a": flat})
    assert len(picture) < 60_000
    line = next(p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if p.get("class") == "line")
    heights = {y for _, y in (pair.split(",") for pair in line.attrib["d"][1:].split("L"))}
    assert len(heights) == 2


@pytest.mark.parametrize("draw", [lambda s: svg("t", s), terminal])
def test_little_or_nothing_to_draw(draw: Callable[[dict[str, Points]], str]) -> None:
    assert "no points yet" in draw({})
    assert "no points yet" in draw({"a": []})
    assert "no points yet" in draw({"a": [(0, math.nan), (math.inf, 1)]})
    assert "(no points)" in draw({"a": [], "b": [(0, 1.0)]})
    some: list[Points] = [[(7, 0.5)], [(i, 3.0) for i in range(50)], [(1, 0.0), (1, 1.0)]]
    for one in some:
        assert "no points" not in draw({"a": one})


def test_text_shows_a_line_that_rises() -> None:
    text = terminal({"reward": [(0, 0.0), (10, 1.0)]}, width=20, height=4)
    assert text.split("\n") == [
        "1.0 ┤           ⢀⡠⠔⠊",
        "    │       ⢀⡠⠔⠊⠁",
        "0.5 ┤   ⢀⡠⠔⠊⠁",
        "  0 ┤⡠⠔⠊⠁",
        "    └┬──────┬──────┬",
        "     0      5     10",
        "                step",
        "reward  0 → 1",
        "",
    ]


def test_several_series_carry_letters() -> None:
    text = terminal({"up": [(0, 0.0), (50, 1.0)], "down": [(0, 1.0), (50, 0.0)]})
    rows = text.split("\n")
    assert rows[0].endswith("a")
    assert rows[13].endswith("b")
    assert rows[-3:] == ["a  up  0 → 1", "b  down  1 → 0", ""]
