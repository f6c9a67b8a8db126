"""Draws a simulated step as SVG: a lane per rank set, a bar per task; its pale end is the wait for stragglers."""

from xml.sax.saxutils import escape

from rich.cells import cell_len

from distflow.plan.layout import ranks_text
from distflow.plan.table import headline, rank_set_names
from distflow.simulate.report import Report
from distflow.simulate.result import RankSet, TaskSpan
from distflow.util.text import clean, human_bytes, seconds

_COLORS = {"run": "#2b66c4", "move": "#b56500", "weights": "#7145c2", "control": "#0d7580"}
_LABELS = {"run": "computes", "move": "moves fields", "weights": "weight sync", "control": "metrics and stop vote"}
_LANES = ("#eaf2fd", "#fef3e0", "#e7f6ec", "#f3ecfd")
_INK, _SOFT, _WHITE = "#1c2430", "#5b6675", "#ffffff"
_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_MARGIN, _LABEL, _WIDTH, _ROW, _TOP = 20, 190, 820, 64, 100


def svg(report: Report) -> str:
    """Returns a self-contained drawing with a white background."""
    result = report.result
    lanes = [r for r in result.rank_sets if r.spans]
    height = _TOP + _ROW * len(lanes) + 70
    width = 2 * _MARGIN + _LABEL + _WIDTH
    title, numbers, *_ = headline(report.plan)
    step = f"step {seconds(result.step_s)}, of which data plane {seconds(result.data_plane_s)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="{_FONT}"><rect width="100%" height="100%" rx="12" fill="{_WHITE}"/>',
        _text(_MARGIN, 36, f"{title} on {report.hardware.name}", 20, _INK, bold=True),
        _text(_MARGIN, 58, numbers, 12, _SOFT),
        _text(_MARGIN, 76, step, 12, _SOFT),
        *(_lane(report, r, n) for n, r in enumerate(lanes)),
        _axis(result.step_s, _TOP + _ROW * len(lanes) + 16),
        _legend(_TOP + _ROW * len(lanes) + 50, {s.kind for r in lanes for s in r.spans}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lane(report: Report, rank_set: RankSet, n: int) -> str:
    top, scale = _TOP + _ROW * n, _WIDTH / max(report.result.step_s, 1e-12)
    names = "/".join(rank_set_names(report.plan, rank_set.ranks)) or "ranks"
    shares = f"idle {100 * rank_set.idle:.0f} % · {human_bytes(rank_set.memory.peak)}"
    out = (
        f'<rect class="lane" x="{_MARGIN}" y="{top}" width="{_LABEL + _WIDTH}" height="{_ROW - 8}" rx="10"'
        f' fill="{_LANES[n % len(_LANES)]}"/>'
    )
    for i, text in enumerate((f"{names} {ranks_text(rank_set.ranks)}", shares)):
        out += _text(_MARGIN + 12, top + 24 + 17 * i, clean(text), 13 - 2 * i, _INK if i == 0 else _SOFT, bold=i == 0)
    for span in rank_set.spans:
        out += _bar(span, top, scale)
    return out


def _bar(span: TaskSpan, top: float, scale: float) -> str:
    x = _MARGIN + _LABEL + span.start_s * scale
    solid, whole = ((end - span.start_s) * scale for end in (span.mean_end_s, span.end_s))
    color = _COLORS[span.kind]
    text = f"{span.name}: {seconds(span.end_s - span.start_s)}"
    out = f'<g class="{span.kind}"><title>{escape(clean(text))}</title>'
    for width, opacity in ((whole, 0.3), (solid, 0.9)):
        out += (
            f'<rect x="{x:.2f}" y="{top + 8}" width="{max(width, 0.8):.2f}" height="{_ROW - 24}" rx="2" fill="{color}"'
        )
        out += f' fill-opacity="{opacity}"/>'
    if cell_len(text) * 6.6 < solid:
        out += _text(x + 6, top + 33, clean(text), 11, _WHITE)
    return out + "</g>"


def _axis(step: float, y: float) -> str:
    x0 = _MARGIN + _LABEL
    out = ""
    for i in range(6):
        x = x0 + _WIDTH * i / 5
        out += f'<path d="M{x:.1f},{y - 14}v6" stroke="{_SOFT}"/>'
        out += _text(x, y + 4, seconds(step * i / 5), 11, _SOFT, middle=True)
    return out


def _legend(y: float, kinds: set[str]) -> str:
    x, out = float(_MARGIN), ""
    for kind in (k for k in _COLORS if k in kinds):
        out += f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2" fill="{_COLORS[kind]}"/>'
        out += _text(x + 18, y, _LABELS[kind], 11, _SOFT)
        x += 18 + cell_len(_LABELS[kind]) * 6.6 + 20
    return out + _text(x, y, "pale: waiting for the slowest worker", 11, _SOFT)


def _text(x: float, y: float, text: str, size: int, color: str, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="600"' * bold + ' text-anchor="middle"' * middle
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{style}>{escape(text)}</text>'
