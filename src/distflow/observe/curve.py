"""The learning curve of one or more runs, from their metrics: SVG for a page, braille for a terminal."""

import json
import math
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np
from rich.cells import cell_len, set_cell_size

from distflow.errors import DataError, suggest
from distflow.plan.units import clean

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito; told apart by all eyes
_DASHES = ("", "7 4", "2 3", "9 3 2 3")  # once the colours are used up
_INK, _SOFT, _AXIS, _GRID, _WHITE = "#1c2430", "#5b6675", "#8b95a3", "#e6e9ee", "#ffffff"
_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_WIDTH, _PLOT, _MARGIN, _LABEL, _CELLS = 860, 330, 24, 18, 30  # _LABEL: height of one; _CELLS: its longest text
_MANY = 30  # points from which on a restless series is drawn as its mean
_FAR, _NEAR, _SAME = 1e300, 1e-290, 1e-9  # beyond, differences overflow; below, they vanish; relative: no difference
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LETTER_EVERY = 14  # columns of a terminal


@dataclass(frozen=True)
class _Curve:
    name: str
    points: list[Point]
    line: list[Point]  # the points, or their moving mean
    window: int  # values in a mean, fewer at the ends; 1: the line goes through the points


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: list[tuple[float, str]]

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


class _Box(NamedTuple):
    left: float
    right: float
    top: float
    bottom: float

    def place(self, points: Iterable[Point], across: _Axis, up: _Axis) -> list[Point]:
        wide, high = self.right - self.left, self.bottom - self.top
        return [(self.left + across.part(x) * wide, self.bottom - up.part(y) * high) for x, y in points]


def read(path: Path, *names: str) -> dict[str, list[tuple[int, float]]]:
    """The points of these metrics, or of all, in the order of steps. Of a step written twice, the last word counts."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror}); name the metrics.jsonl of a run") from e
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for n, line in enumerate(lines, 1):
        record = _record(line)
        if record is None and line.strip() and n < len(lines):  # the last may be half written
            raise DataError(f"{path}, line {n}: not the metrics of a step; remove the line")
        for name, value in (record or {}).items():
            if record and name not in ("step", "time") and isinstance(value, float) and math.isfinite(value):
                found[name][int(record["step"])] = value
    for name in names:
        if name not in found:
            raise DataError(f"{path}: no point of metric '{name}'{suggest(name, found)}")
    return {name: sorted(found[name].items()) for name in names or found}


def _record(line: str) -> dict[str, float] | None:
    try:
        record = json.loads(line, parse_int=float)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, float) and math.isfinite(step) else None


def svg(
    title: str, series: Series, x: str = "step", y: str = "", *, headline: str | None = None, percent: bool = False
) -> str:
    """A self-contained picture with a white background.

    The headline series is drawn on top, with its value before and after. `percent` shows 0…1 as 0…100%. A restless
    series of many points becomes faint dots and their moving mean, and then before and after are ends of the mean.
    """
    if headline is not None and headline not in series:
        raise DataError(f"headline: no series '{headline}'{suggest(headline, series)}")
    curves = _curves(series, percent)
    across, up = _axes(curves, percent, 8, 6)
    notes = [f"{c.name}: {_before_after(c, percent)}" for c in curves if c.name == headline and c.line]
    if windows := sorted({c.window for c in curves if c.window > 1}):
        notes.append(f"faint dots: every value · line: moving mean of {' or '.join(map(str, windows))}")
    labels = [_clip(_label(c, headline, percent), _CELLS) for c in curves]
    left = _MARGIN + 10 + max(_width(t, 11) for _, t in up.ticks)
    right = _WIDTH - _MARGIN - 36 - max((_width(t, 13) for t in labels), default=0)  # as if bold
    top = 52 + 18 * len(notes) + (26 if y else 8)
    box = _Box(left, right, top, top + max(_PLOT, _LABEL * len(curves)))
    lines = [_thin(box.place(c.line, across, up)) for c in curves]
    heights = _settle([line[-1][1] if line else box.bottom for line in lines], box.top + 6, box.bottom - 6)
    middle, width, height = (left + right) / 2, _WIDTH, round(box.bottom + 56)
    dots, drawn, keys = [], [], []
    for i in sorted(range(len(curves)), key=lambda i: curves[i].name == headline):  # the headline lies on top
        c, color, dash, bold = curves[i], _COLORS[i % len(_COLORS)], _dash(i), curves[i].name == headline
        if c.window > 1 or len(c.line) <= _MANY:
            dots.append(_dots(_thin(box.place(c.points, across, up)), color, faint=c.window > 1))
        drawn.append(_line(lines[i], color, dash, bold))
        if bold and c.line:
            drawn.append(_ends(lines[i], _value(c.line[0][1], percent), color, lines, box))
        keys.append(_key(labels[i], color, dash, right + 10, heights[i], bold))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{_FONT}"><rect width="100%" height="100%" rx="12" fill="{_WHITE}"/>',
        _text(_MARGIN, 36, title, 18, _INK, bold=True),
        *(_text(_MARGIN, 58 + 18 * n, t, 12, _SOFT) for n, t in enumerate(notes)),
        _text(_MARGIN, top - 14, y, 11, _SOFT),
        _grid(up, box),
        _floor(across, box),
        _text(middle, box.bottom + 40, _clip(x, (right - left) / _width("x", 11)), 11, _SOFT, "middle"),
        *dots,
        *drawn,
        *keys,
        "" if any(lines) else _text(middle, (box.top + box.bottom) / 2, "no points yet", 13, _SOFT, "middle"),
        "</svg>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def terminal(series: Series, width: int = 72, height: int = 14, x: str = "step", *, percent: bool = False) -> str:
    """The same curves as text: `height` rows of braille, the axis, and a line per series with its first and last value.

    Of several series each carries its letter here and there, for there is no colour.
    """
    height = max(height, 2)
    curves = _curves(series, percent)
    across, up = _axes(curves, percent, max(2, width // 12), max(2, height // 3))
    gutter = max(len(t) for _, t in up.ticks)
    columns = max(width - gutter - 2, 2)
    dots = [[0] * columns for _ in range(height)]
    letters: dict[tuple[int, int], str] = {}
    for i, c in enumerate(curves):
        cells = _draw(_Box(0, 2 * columns - 1, 0, 4 * height - 1).place(c.line, across, up), dots)
        if len(curves) > 1:
            offset = i * _LETTER_EVERY // len(curves)
            spots = {col: row for row, col in cells if col % _LETTER_EVERY == offset}
            spots.update((col, row) for row, col in cells[-1:])
            letters.update({(row, col): _letter(i) for col, row in spots.items()})
    names = {round((1 - up.part(v)) * (4 * height - 1)) // 4: t for v, t in up.ticks}
    out = []
    for row, masks in enumerate(dots):
        body = "".join(letters.get((row, col)) or (chr(0x2800 + m) if m else " ") for col, m in enumerate(masks))
        if not any(c.line for c in curves) and row == height // 2:
            body = "no points yet".center(columns)
        out.append(f"{names.get(row, ''):>{gutter}} {'┤' if row in names else '│'}{body}")
    marks = [(gutter + 2 + round(across.part(v) * (columns - 1)), t) for v, t in across.ticks]
    out += _ruler(marks, gutter + 1, width, clean(x))
    for i, c in enumerate(curves):
        letter, ends = f"{_letter(i)}  " * (len(curves) > 1), f"  {_before_after(c, percent)}"
        out.append(letter + _clip(c.name, max(width - len(letter + ends), 1)) + ends)
    return "\n".join(_clip(line, width).rstrip() for line in out) + "\n"


def _curves(series: Series, percent: bool) -> list[_Curve]:
    curves = []
    for name, given in series.items():
        points = [(float(x), float(y) * (100 if percent else 1)) for x, y in given]
        points = sorted((p for p in points if max(map(abs, p)) <= _FAR and not math.isnan(sum(p))), key=lambda p: p[0])
        window = _window([y for _, y in points])
        curves.append(_Curve(name, points, _mean(points, window), window))
    return curves


def _window(ys: list[float]) -> int:
    """1 for a series that is calm, or so short that every point counts."""
    if len(ys) < _MANY or sum(abs(b - a) for a, b in pairwise(ys)) <= 4 * (max(ys) - min(ys)):
        return 1
    return max(5, len(ys) // 12) | 1  # odd, so that it has a middle


def _mean(points: list[Point], window: int) -> list[Point]:
    """Narrower towards the ends: a mean that looks to one side only would lag behind a steep start."""
    if window == 1:
        return points
    ys = np.array([y for _, y in points])
    sums = np.concatenate([[0.0], np.cumsum(ys - ys.mean())])  # about the mean, where rounding hurts least
    here = np.arange(len(ys))
    reach = np.clip(np.minimum(here, here[::-1]), max(2, window // 6), window // 2)
    first, last = np.maximum(here - reach, 0), np.minimum(here + reach + 1, len(ys))
    means = (sums[last] - sums[first]) / (last - first) + ys.mean()
    return [(x, float(m)) for (x, _), m in zip(points, means, strict=True)]


def _axes(curves: list[_Curve], percent: bool, most_x: int, most_y: int) -> tuple[_Axis, _Axis]:
    xs = [x for c in curves for x, _ in c.points]
    ys = [y for c in curves for _, y in (c.points if c.window == 1 else c.points + c.line)]
    whole = all(x.is_integer() for x in xs)
    return _axis(xs, most_x, whole=whole), _axis(ys + [0, 100] * percent, most_y, round_ends=True, unit="%" * percent)


def _axis(values: Sequence[float], most: int, whole: bool = False, round_ends: bool = False, unit: str = "") -> _Axis:
    """Ticks at 1, 2 or 5 times a power of ten, about `most` of them; `whole`: at whole numbers only."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= max(_SAME * max(abs(low), abs(high)), _NEAR):  # all the same: make room around it
        pad = abs(low) / 2 if abs(low) > _NEAR else 1.0
        low, high = low - pad, high + pad
    power = math.floor(math.log10((high - low) / most))
    lead = next((m for m in (1, 2, 5) if m * 10.0**power * most >= (high - low) * (1 - _SAME)), 10)
    if lead == 10 or (whole and power < 0):
        lead, power = 1, 0 if whole and power < 0 else power + 1
    step = lead * 10.0**power
    ends = (math.floor(low / step + _SAME), math.ceil(high / step - _SAME))
    inner = (math.ceil(low / step - _SAME), math.floor(high / step + _SAME))
    if round_ends:
        low, high = ends[0] * step, ends[1] * step
    first, last = ends if round_ends else inner
    ticks = [Decimal(n * lead).scaleb(power) for n in range(first, last + 1)]
    plain = max((abs(t) for t in ticks), default=Decimal(0)) < 1_000_000 and power >= -5
    return _Axis(low, high, [(float(t), _tick(t, plain) + unit) for t in ticks])


def _tick(value: Decimal, plain: bool) -> str:
    if not value:
        return "0"
    return _tidy(f"{value:f}" if plain else f"{value.normalize():e}")


def _value(value: float, percent: bool) -> str:
    if percent and abs(value) < 1e6:
        return _tidy(f"{round(value, 1) + 0.0:.1f}%")  # + 0.0: there is no −0
    return _tidy(f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value + 0.0:.3g}") + "%" * percent


def _tidy(number: str) -> str:
    """`-1e-07` as `−1e−7`."""
    for long, short in (("e+0", "e"), ("e+", "e"), ("e-0", "e-"), ("-", "−")):
        number = number.replace(long, short)
    return number


def _before_after(c: _Curve, percent: bool) -> str:
    ends = [_value(y, percent) for _, y in (c.line if len(c.line) < 2 else (c.line[0], c.line[-1]))]
    return (" → ".join(ends) or "(no points)") + " (moving mean)" * (c.window > 1)


def _label(c: _Curve, headline: str | None, percent: bool) -> str:
    if not c.line:
        return f"{c.name} (no points)"
    return f"{_value(c.line[-1][1], percent)}  {c.name}" if c.name == headline else c.name


def _thin(points: list[Point]) -> list[Point]:
    """Per column of pixels the first, lowest, highest and last: the line looks the same, however long the run."""
    out = []
    for _, group in groupby(points, key=lambda p: int(p[0])):
        some = list(group)
        ys = [y for _, y in some]
        out += [some[i] for i in sorted({0, ys.index(min(ys)), ys.index(max(ys)), len(some) - 1})]
    return out


def _settle(wanted: list[float], top: float, bottom: float) -> list[float]:
    """Heights of labels near the wanted ones, none on another."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    found = list(wanted)
    last = top - _LABEL
    for i in order:
        last = found[i] = max(found[i], last + _LABEL)
    last = bottom + _LABEL
    for i in reversed(order):
        last = found[i] = min(found[i], last - _LABEL)
    return found


def _grid(axis: _Axis, box: _Box) -> str:
    out = ""
    for value, label in axis.ticks:
        y = box.bottom - axis.part(value) * (box.bottom - box.top)
        out += f'<path d="M{box.left:.1f},{y:.1f}H{box.right:.1f}" stroke="{_GRID}"/>'
        out += _text(box.left - 10, y + 4, label, 11, _SOFT, "end")
    return out


def _floor(axis: _Axis, box: _Box) -> str:
    out, end = f'<path d="M{box.left:.1f},{box.bottom:.1f}H{box.right:.1f}" stroke="{_AXIS}"/>', 0.0
    for value, label in axis.ticks:
        x, half = box.left + axis.part(value) * (box.right - box.left), _width(label, 11) / 2
        out += f'<path d="M{x:.1f},{box.bottom:.1f}v5" stroke="{_AXIS}"/>'
        if x - half > end + 6:  # long labels leave out some
            out, end = out + _text(x, box.bottom + 20, label, 11, _SOFT, "middle"), x + half
    return out


def _dash(i: int) -> str:
    dash = _DASHES[i // len(_COLORS) % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _dots(points: list[Point], color: str, faint: bool) -> str:
    d = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in points)
    style = 'stroke-width="3.2" stroke-opacity="0.28"' if faint else 'stroke-width="6"'
    return f'<path class="dots" d="{d}" stroke="{color}" stroke-linecap="round" {style}/>' if d else ""


def _line(points: list[Point], color: str, dash: str, bold: bool) -> str:
    d = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'stroke="{color}" stroke-width="{3 if bold else 2}" stroke-linejoin="round"{dash}'
    return f'<path class="line" d="{d}" fill="none" {style}/>' if len(points) > 1 else ""


def _ends(line: list[Point], first: str, color: str, lines: list[list[Point]], box: _Box) -> str:
    """Rings at both ends, and the first value where fewest lines run; the last one stands in the label."""
    rings = dict.fromkeys((line[0], line[-1]))
    style = f'r="5" fill="{_WHITE}" stroke="{color}" stroke-width="2.5"'
    out = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" {style}/>' for x, y in rings)
    if len(rings) == 1:
        return out
    (x, y), width, height = line[0], _width(first, 13) + 6, 18
    x = min(max(x - 4, box.left + 2), box.right - width)
    spots = [(x, y - 28), (x, y + 10)]  # above and below
    spots = [s for s in spots if box.top <= s[1] <= box.bottom - height]

    def crossed(spot: Point) -> int:
        at = np.linspace(spot[0], spot[0] + width, 12)
        ways = [np.interp(at, [x for x, _ in p], [y for _, y in p], left=-1, right=-1) for p in lines if p]
        return sum(int(((w > spot[1]) & (w < spot[1] + height)).sum()) for w in ways)

    x, y = min(spots, key=crossed)
    back = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="4" fill="{_WHITE}" opacity="0.8"/>'
    return out + back + _text(x + 3, y + 14, first, 13, _INK, bold=True)


def _key(text: str, color: str, dash: str, x: float, y: float, bold: bool) -> str:
    line = f'<path d="M{x:.1f},{y:.1f}h18" stroke="{color}" stroke-width="{4 if bold else 3}"{dash}/>'
    return line + _text(x + 24, y + 4, text, 12, _INK, bold=bold)


def _clip(text: str, cells: float) -> str:
    text = clean(text)
    return text if cell_len(text) <= cells else set_cell_size(text, max(int(cells) - 1, 0)).rstrip() + "…"


def _width(text: str, size: float) -> float:
    """An estimate that is wide enough for the fonts people have; headings are bold."""
    return cell_len(text) * size * (0.66 if size >= 13 else 0.6)


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str = "start", bold: bool = False) -> str:
    if anchor == "start":
        text = _clip(text, (_WIDTH - _MARGIN - x) / _width("x", size))
    style = f' text-anchor="{anchor}"' * (anchor != "start") + ' font-weight="600"' * bold
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{style}>{escape(text)}</text>' if text else ""
    )


def _draw(points: list[Point], dots: list[list[int]]) -> list[tuple[int, int]]:
    """Set the dots of a line; returns the cells it passes, row and column, in its order."""
    cells: dict[tuple[int, int], None] = {}
    spots = [(round(x), round(y)) for x, y in _thin(points)]
    for (x0, y0), (x1, y1) in pairwise(spots[:1] + spots):  # the first with itself: one point is a dot
        n = max(abs(x1 - x0), abs(y1 - y0), 1)
        for k in range(n + 1):
            x, y = round(x0 + (x1 - x0) * k / n), round(y0 + (y1 - y0) * k / n)
            dots[y // 4][x // 2] |= _BRAILLE[y % 4][x % 2]
            cells[y // 4, x // 2] = None
    return list(cells)


def _letter(i: int) -> str:
    return string.ascii_letters[i % len(string.ascii_letters)]


def _ruler(marks: list[tuple[int, str]], left: int, width: int, name: str) -> list[str]:
    """The axis, the numbers below it, and its name at the right, in a line of its own where there is no room."""
    line, below = ["─"] * max(width - left - 1, 2), ""
    for at, text in marks:
        line[at - left - 1] = "┬"
        start = max(0, min(at - len(text) // 2, width - len(text)))
        if start > len(below) or not below:
            below = below.ljust(start) + text
    beside = len(below) + cell_len(name) < width
    named = [below.ljust(width - cell_len(name)) + name] if beside else [below, " " * (width - cell_len(name)) + name]
    return [" " * left + "└" + "".join(line), *named]
