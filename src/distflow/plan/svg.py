"""Draws a plan as SVG: a lane per set of ranks, a box per node, a pill per move.

The drawing is a grid of columns and bands; bands are the lanes and the gaps between them, where data changes ranks.
Lines bend only between columns. A line that passes through a column has a place in its stack, like a box, so nothing
overlaps in any graph.
"""

import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from xml.sax.saxutils import escape

from rich.cells import cell_len

from distflow.flow.graph import SOURCE
from distflow.plan.layout import ranks_text
from distflow.plan.table import headline, origins, rank_set_names, role_and_type, shown_moves, weight_bytes
from distflow.plan.tasks import Move, Plan, RunNode, SyncWeights
from distflow.util.text import clean, human_bytes, names

_BACKGROUND = ("#eaf2fd", "#fef3e0", "#e7f6ec", "#f3ecfd", "#fdeaf1", "#e3f5f6")  # lanes take turns
_FOREGROUND = ("#2b66c4", "#b56500", "#1d7f46", "#7145c2", "#b93067", "#0d7580")
_INK, _SOFT, _GREY, _WHITE = "#1c2430", "#5b6675", "#8b95a3", "#ffffff"
_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_MARGIN, _GUTTER, _GAP, _PAD, _LINE, _ARROW, _SWEEPS = 20, 42, 12, 16, 15, 8, 16
_LINES = {  # kind of line → its style, its text in the legend
    "local": ('stroke-width="1.4"', "local: stays on its ranks"),
    "move": ('stroke-width="3"', "a move: one all-to-all, expected bytes per step"),
    "weights": ('stroke-width="3" stroke-dasharray="9 4"', "weights, as the step before left them"),
    "order": ('stroke-width="1.4" stroke-dasharray="4 3"', "order only"),
}

Vertex = str | Move | SyncWeights  # the id of a node, a move, or a weight sync
Arcs = dict[tuple[Vertex, Vertex], str]  # (from, to) → kind of line
Segment = tuple["_Item", "_Item", str]  # a line from one column to the next, and its kind
Span = tuple[float, float]  # top and bottom


@dataclass(eq=False)
class _Item:
    """The box of a node, the pill of a move, or the point where a line passes through a column."""

    column: int
    band: int  # 2i is lane i, odd ones are the gaps between lanes
    color: str
    lines: list[str] = field(default_factory=list)
    box: bool = False
    x: float = 0  # left
    y: float = 0  # middle
    width: float = 0
    height: float = 4
    bounds: tuple[float, float] = (0, 0)  # left and right of its column
    before: list["_Item"] = field(default_factory=list)  # in the column to the left, connected by a line
    after: list["_Item"] = field(default_factory=list)


def svg(plan: Plan) -> str:
    """Returns a self-contained drawing with a white background."""
    arcs = _arcs(plan)
    lanes = list(dict.fromkeys(frozenset(plan.partition_of(i).layout.ranks) for i in plan.home))
    items = _items(plan, lanes, _columns(plan, arcs))
    segments = _segments(items, arcs)
    placed = list(dict.fromkeys([*items.values(), *(b for _, b, _ in segments)]))
    labels = [_label(plan, r) for r in lanes]
    right = _place_x(placed, 2 * _MARGIN + 14 + max(_width(t, 13) for label in labels for t in label))
    title, *lines = headline(plan)
    spans = _place_y(placed, [_LINE * len(label) for label in labels], 56 + 18 * len(lines) + _PAD)
    width = max(right, 600, _width(title, 20), *(_width(t, 12) for t in lines)) + 2 * _MARGIN
    end = spans[-1][1] + _PAD + 28
    w, h = round(width), round(end + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" font-family="{_FONT}">'
        f'<rect width="100%" height="100%" rx="12" fill="{_WHITE}"/>',
        _text(_MARGIN, 36, title, 20, _INK, bold=True),
        *(_text(_MARGIN, 58 + 18 * n, t, 12, _SOFT) for n, t in enumerate(lines)),
        *(_lane(label, n, spans[2 * n], width) for n, label in enumerate(labels)),
        *(_line(*segment) for segment in sorted(segments, key=lambda s: s[2] == "move")),  # moves on top
        *(_shape(plan, vertex, item) for vertex, item in items.items()),
        _legend(end, {kind for _, _, kind in segments}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _label(plan: Plan, ranks: frozenset[int]) -> list[str]:
    """Returns the names of a lane's rank sets, its ranks and, with staleness, their step."""
    names = [*rank_set_names(plan, ranks), f"ranks {ranks_text(tuple(sorted(ranks)))}"]
    if plan.staleness:
        names.insert(-1, f"step k … k+{plan.staleness}" if ranks <= plan.ahead else "step k")
    return names


def _arcs(plan: Plan) -> Arcs:
    """Returns local edges, edges into and out of moves, and `after` without data."""
    arcs: Arcs = {}
    for vertex, sources in origins(plan).items():
        for source in sources.values():
            arcs[source, vertex] = "move" if isinstance(source, Move) or isinstance(vertex, Move) else "local"
    arcs |= dict.fromkeys(_weight_syncs(plan), "weights")
    data = {(e.writer, e.reader) for e in plan.edges}
    orders = ((a, n.id) for n in plan.flow.nodes for a in n.after if a != SOURCE)
    return arcs | {pair: "order" for pair in orders if pair not in data}


def _weight_syncs(plan: Plan) -> list[tuple[SyncWeights, str]]:
    """Returns the weight syncs, each with the node that generates with the weights."""
    tasks = [t for t in plan.tasks if isinstance(t, SyncWeights | RunNode)]
    return [(a, b.node) for a, b in pairwise(tasks) if isinstance(a, SyncWeights) and isinstance(b, RunNode)]


def _columns(plan: Plan, arcs: Arcs) -> dict[Vertex, int]:
    """Puts nodes of equal depth in one column, except those whose move waits for another node of that depth."""
    depth = plan.flow.depth
    before: dict[str | Move, list[str | Move]] = {
        v: [a for a, b in arcs if b == v and not isinstance(a, SyncWeights)] for v in origins(plan)
    }
    upstream: dict[str | Move, int] = {SOURCE: -1}  # the greatest depth upstream
    for v, parents in before.items():
        upstream[v] = max((depth[p] if p in depth else upstream[p] for p in parents), default=-1)
    column: dict[Vertex, float] = {}
    floor = [0.0] * (max(depth.values(), default=0) + 2)
    for d in range(len(floor)):
        column = {SOURCE: 0.0}
        for v, parents in before.items():
            column[v] = max([column[p] + 1 for p in parents] + [1 if isinstance(v, Move) else max(1, floor[depth[v]])])
        floor[d] = max((column[i] for i in depth if depth[i] == d and upstream[i] < d), default=0)
    for m in reversed(shown_moves(plan)):  # a move happens when its first reader needs it
        column[m] = min(column[b] for a, b in arcs if a == m) - 1
    for weights, node in _weight_syncs(plan):
        column[weights] = min(column.get(weights, column[node]), column[node] - 0.5)  # in a column of its own
    used = sorted(set(column.values()))
    return {v: used.index(c) for v, c in column.items()}


def _items(plan: Plan, lanes: list[frozenset[int]], columns: dict[Vertex, int]) -> dict[Vertex, _Item]:
    items: dict[Vertex, _Item] = {}
    for v, column in columns.items():
        if isinstance(v, SyncWeights):
            dst = lanes.index(frozenset(v.target.ranks))
            trained = frozenset(v.source.ranks) if v.source else None
            src = lanes.index(trained) if trained in lanes else dst
            band, color = 2 * dst - (src < dst) + (src > dst), _FOREGROUND[src % len(_FOREGROUND)]
            lines = [f"{clean(v.role)} weights · {weight_bytes(v)}", f"{v.source or 'untrained'} → {v.target}"]
        elif isinstance(v, Move):
            src, dst = lanes.index(frozenset(v.src.layout.ranks)), lanes.index(frozenset(v.dst.layout.ranks))
            band, color = 2 * dst - (src < dst) + (src > dst), _FOREGROUND[src % len(_FOREGROUND)]
            fields = textwrap.wrap(names(v.fields), 20, break_long_words=False, break_on_hyphens=False)
            lines = [f"{v.id} · {human_bytes(v.expected_bytes)}", *fields]
        else:
            p = plan.partition_of(v)
            lane = lanes.index(frozenset(p.layout.ranks))
            band, color = 2 * lane, _FOREGROUND[lane % len(_FOREGROUND)]
            role = "loader" if v == SOURCE else role_and_type(plan.flow.node(v))
            lines = [v, role, str(p.layout)] + ([f"balanced by {clean(p.balance)}"] if p.balance else [])
        width = max(_width(t, 11 if i else 13) for i, t in enumerate(lines)) + 22
        items[v] = _Item(column, band, color, lines, isinstance(v, str), width=width, height=_LINE * len(lines) + 13)
    return items


def _segments(items: dict[Vertex, _Item], arcs: Arcs) -> list[Segment]:
    """Splits every arc into segments from column to column; arcs of equal start and kind share segments."""
    waypoints: dict[tuple[Vertex, str, int], _Item] = {}
    segments: dict[tuple[_Item, _Item], str] = {}
    for (a, b), kind in arcs.items():
        last = items[a]
        for c in range(last.column + 1, items[b].column):
            waypoint = waypoints.setdefault((a, kind, c), _Item(c, last.band, last.color))
            segments[last, waypoint] = kind
            last = waypoint
        segments[last, items[b]] = kind
    for start, end in segments:
        start.after.append(end)
        end.before.append(start)
    return [(a, b, kind) for (a, b), kind in segments.items()]


def _place_x(items: list[_Item], x: float) -> float:
    """Places all items horizontally, starting at x; returns the right end."""
    for c in range(max(i.column for i in items) + 1):
        inside = [i for i in items if i.column == c]
        width = max(i.width for i in inside)
        boxes = max((i.width for i in inside if i.box), default=0)
        for i in inside:
            i.bounds = x, x + width
            i.width = boxes if i.box else i.width
            i.x = x + (width - i.width) / 2 if i.lines else x
        x += width + _GUTTER
    return x - _GUTTER


def _place_y(items: list[_Item], labels: list[float], y: float) -> list[Span]:
    """Orders every stack so that few lines cross, then straightens the lines. Returns the span of every band."""
    stacks: dict[tuple[int, int], list[_Item]] = defaultdict(list)
    for i in items:
        stacks[i.column, i.band].append(i)
    spans: list[Span] = []
    for band in range(2 * len(labels) - 1):
        least = 0 if band % 2 else labels[band // 2]
        need = max([least, *(_height(s) for (_, b), s in stacks.items() if b == band)])
        spans.append((y, y + need))
        y += need + _PAD + _GAP  # every other band is a lane, which is padded
    for sweep in range(_SWEEPS):
        for (_, band), stack in sorted(stacks.items(), key=lambda s: s[0], reverse=bool(sweep % 2)):
            wanted = {i: sum(spans[band]) / 2 for i in stack}
            for i in stack if sweep else ():
                near = i.after if sweep % 2 else i.before
                if sweep > _SWEEPS // 2:  # straight lines, boxes centred on theirs
                    near = i.before + i.after if i.lines else i.before
                if near:
                    wanted[i] = sum(n.y for n in near) / len(near)
            if sweep <= _SWEEPS // 2:
                stack.sort(key=wanted.__getitem__)
            _settle(stack, [wanted[i] for i in stack], *spans[band])
    return spans


def _height(stack: list[_Item]) -> float:
    return sum(i.height for i in stack) + _GAP * (len(stack) - 1)


def _settle(stack: list[_Item], wanted: list[float], top: float, bottom: float) -> None:
    """Places a stack as near to the wanted heights as order and no overlap allow (isotonic regression)."""
    starts = list(accumulate((i.height + _GAP for i in stack), initial=0.0))
    runs: list[tuple[float, int]] = []  # mean shift, number of items that share it
    for i, start, w in zip(stack, starts, wanted, strict=False):
        shift, n = w - i.height / 2 - start, 1
        while runs and runs[-1][0] > shift:
            mean, m = runs.pop()
            shift, n = (shift * n + mean * m) / (n + m), n + m
        runs.append((shift, n))
    for i, start, shift in zip(stack, starts, (shift for shift, n in runs for _ in range(n)), strict=False):
        i.y = start + i.height / 2 + min(max(shift, top), bottom - _height(stack))


def _lane(label: list[str], n: int, span: Span, width: float) -> str:
    (top, bottom), color = span, _FOREGROUND[n % len(_FOREGROUND)]
    background = _BACKGROUND[n % len(_BACKGROUND)]
    size = f'width="{width - 2 * _MARGIN:.1f}" height="{bottom - top + 2 * _PAD:.1f}"'
    out = f'<rect class="lane" x="{_MARGIN}" y="{top - _PAD:.1f}" {size} rx="10" fill="{background}"/>'
    for k, t in enumerate(label, -len(label)):  # names of rank sets, then the ranks
        y = (top + bottom) / 2 + _LINE * (k + (len(label) + 1) / 2) + 4
        out += _text(_MARGIN + 14, y, t, 11 if k == -1 else 13, color, bold=k < -1)
    return out


def _line(a: _Item, b: _Item, kind: str) -> str:
    ends = sorted(b.before, key=lambda i: i.y)
    spread = min(10.0, (b.height - 16) / len(ends)) if b.lines else 0.0
    y = b.y + (ends.index(a) - (len(ends) - 1) / 2) * spread
    color, head = (a.color if kind == "move" else _GREY), (_ARROW if b.lines else 0)
    x0, x1 = a.bounds[1], b.bounds[0]
    bend = f"C{(x0 + x1) / 2:.1f},{a.y:.1f} {(x0 + x1) / 2:.1f},{y:.1f} {x1 - head:.1f},{y:.1f}"
    start, end = (a.x + a.width if a.lines else a.x), b.x - head
    path = f"M{start:.1f},{a.y:.1f}H{x0:.1f}{bend}H{end:.1f}"
    tip = f'<path d="M{end:.1f},{y - 4.5:.1f}l{head},4.5l-{head},4.5z" fill="{color}"/>' if head else ""
    return f'<path class="{kind}" d="{path}" fill="none" stroke="{color}" {_LINES[kind][0]}/>{tip}'


def _shape(plan: Plan, vertex: Vertex, i: _Item) -> str:
    """Draws a box or a pill; the box of a node that trains is filled."""
    train = isinstance(vertex, str) and vertex != SOURCE and plan.flow.node(vertex).type == "train"
    ink, soft = (_WHITE, _WHITE) if train else (_INK if i.box else i.color, _SOFT)
    x, y = i.x + i.width / 2, i.y - i.height / 2
    texts = [_text(x, y + 18, i.lines[0], 13, ink, bold=True, middle=True)]
    texts += [_text(x, y + 18 + _LINE * k, t, 11, soft, middle=True) for k, t in enumerate(i.lines) if k]
    size = f'x="{i.x:.1f}" y="{y:.1f}" width="{i.width:.1f}" height="{i.height:.1f}" rx="{8 if i.box else 16}"'
    paint = f'fill="{i.color if train else _WHITE}" stroke="{i.color}" stroke-width="{1.5 if i.box else 2.5}"'
    kind = "weights" if isinstance(vertex, SyncWeights) else "node" if i.box else "move"
    return f'<g class="{kind}"><rect {size} {paint}/>{"".join(texts)}</g>'


def _legend(y: float, used: set[str]) -> str:
    x, out = float(_MARGIN), ""
    for kind in (kind for kind in _LINES if kind in used):
        style, text = _LINES[kind]
        color = _FOREGROUND[0] if kind == "move" else _GREY
        out += f'<path d="M{x:.1f},{y - 4:.1f}h26" stroke="{color}" {style}/>' + _text(x + 33, y, text, 11, _SOFT)
        x += 33 + _width(text, 11) + 24
    return out


def _width(text: str, size: float) -> float:
    """Estimates the width of a text, generously enough for common fonts; headings are bold."""
    return cell_len(text) * size * (0.66 if size >= 13 else 0.6)


def _text(x: float, y: float, text: str, size: int, color: str, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="600"' * bold + ' text-anchor="middle"' * middle
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{style}>{escape(text)}</text>'
