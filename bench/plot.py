"""Draws lines on logarithmic axes as SVG, without a library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLORS = ("#2b66c4", "#b93067", "#b56500", "#7145c2", "#1d7f46", "#0d7580")
INK, SOFT, GRID = "#1c2430", "#5b6675", "#e3e7ec"
FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440, 330, 58, 58, 16, 46


@dataclass(frozen=True)
class Chart:
    """`lines`: name → (x, y) of each point. A dashed line is a limit."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    dashed: tuple[str, ...] = ()


def svg(charts: Sequence[Chart]) -> str:
    """Returns the charts side by side with one legend, on a white background. A name has one colour everywhere."""
    names = list(dict.fromkeys(name for c in charts for name in c.lines))
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    width, height = WIDTH * len(charts), HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}"><rect width="100%" height="100%" rx="12" fill="#ffffff"/>'
    ]
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate({i * WIDTH} 0)">', *_chart(chart, color), "</g>"]
    x = float(LEFT)
    for name in names:
        dashes = any(name in c.dashed for c in charts)
        parts.append(_line([(x, HEIGHT + 14), (x + 24, HEIGHT + 14)], color[name], dashes))
        parts.append(_text(x + 30, HEIGHT + 18, name, 11, INK))
        x += 30 + 6 * len(name) + 10
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart, color: Mapping[str, str]) -> list[str]:
    points = [p for line in chart.lines.values() for p in line]
    x_ticks = sorted({x for x, _ in points})
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_ticks[0]) / (math.log(x_ticks[-1] / x_ticks[0]) or 1)
        up = (math.log10(y) - first) / (last - first)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 26, chart.title, 14, INK, bold=True), _text(LEFT, 46, chart.y_label, 11, SOFT)]
    for tick in range(first, last + 1):
        x, y = place(x_ticks[0], 10.0**tick)
        parts.append(f'<path d="M{x:.1f},{y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(_text(x - 8, y + 4, f"{10.0**tick:g}", 11, SOFT, "end"))
    for value in x_ticks:
        x, y = place(value, 10.0**first)
        parts.append(_text(x, y + 17, f"{value:g}", 11, SOFT, "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, chart.x_label, 11, SOFT, "middle"))
    for name, line in chart.lines.items():
        placed = [place(*p) for p in line]
        parts.append(_line(placed, color[name], name in chart.dashed))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color[name]}"/>' for x, y in placed]
    return parts


def _line(points: Sequence[tuple[float, float]], color: str, dashed: bool) -> str:
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' * dashed
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'


def _text(x: float, y: float, text: str, size: int, color: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' * bold
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
