"""Draw a plan as SVG: a lane per set of ranks, a box per node, a pill on the way of every move.

Everything stands in columns and bands; bands are the lanes, and the gaps between them where data changes ranks. Lines
bend only between columns. Where one passes through a column it has a place in the stack there, as a box has: so
nothing overlaps, whatever the graph.
"""

import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from xml.sax.saxutils import escape

from rich.cells import cell_len

from distflow.flow.graph import SOURCE
from distflow.plan.table import group_names, headline, kind, origins
from distflow.plan.tasks import Move, Plan
from distflow.plan.units import clean, human_bytes, names, ranks_text

_BACK = ("#eaf2fd", "#fef3e0", "#e7f6ec", "#f3ecfd", "#fdeaf1", "#e3f5f6")  # lanes take turns
_FORE = ("#2b66c4", "#b56500", "#1d7f46", "#7145c2", "#b93067", "#0d7580")
_INK, _SOFT, _GREY, _WHITE = "#1c2430", "#5b6675", "#8b95a3", "#ffffff"
_FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_MARGIN, _GUTTER, _GAP, _PAD, _LINE, _ARROW, _SWEEPS = 20, 42, 12, 16, 15, 8, 16
_LINES = {  # how a line is drawn, and what the legend says
    "local": ('stroke-width="1.4"', "stays on its ranks"),
    "move": ('stroke-width="3"', "a move: one all-to-all, expected bytes per step"),
    "order": ('stroke-width="1.4" stroke-dasharray="4 3"', "order only"),
}

Stop = str | Move  # a node or a move


@dataclass(eq=False)
class _Item:
    """Something with a place: the box of a node, the pill of a move, or a line that passes through a column."""

    column: int
    band: int  # 2i is lane i, the odd ones are the gaps between
    color: str
    lines: list[str] = field(default_factory=list)
    box: bool = False
    x: float = 0  # left
    y: float = 0  # middle
    width: float = 0
    height: float = 4
    bounds: tuple[float, float] = (0, 0)  # left and right of its column
    before: list["_Item"] = field(default_factory=list)  # in the column to the left, tied to this by a line
    after: list["_Item"] = field(default_factory=list)


def svg(plan: Plan) -> str:
    """A self-contained picture with a white background."""
    arcs = _arcs(plan)
    lanes = list(dict.fromkeys(frozenset(plan.partition_of(i).layout.ranks) for i in plan.home))
    items = _items(plan, lanes, _columns(plan, arcs))
    hops = _hops(items, arcs)
    placed = list(dict.fromkeys([*items.values(), *(b for _, b, _ in hops)]))
    labels = [[*group_names(plan, r), f"ranks {ranks_text(tuple(sorted(r)))}"] for r in lanes]
    right = _place_x(placed, 2 * _MARGIN + 14 + max(_width(t, 13) for label in labels for t in label))
    room = _place_y(placed, [_LINE * len(label) for label in labels], 92 + _PAD)
    title, *said = headline(plan)
    width = max(right, 600, _width(title, 20), *(_width(t, 12) for t in said)) + 2 * _MARGIN
    end = room[-1][1] + _PAD + 28
    w, h = round(width), round(end + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" font-family="{_FONT}">'
        f'<rect width="100%" height="100%" rx="12" fill="{_WHITE}"/>',
        _text(_MARGIN, 36, title, 20, _INK, bold=True),
        *(_text(_MARGIN, 58 + 18 * n, t, 12, _SOFT) for n, t in enumerate(said)),
        *(_lane(label, n, room[2 * n], width) for n, label in enumerate(labels)),
        *(_line(*hop) for hop in sorted(hops, key=lambda h: h[2] == "move")),  # moves lie on top
        *(_shape(plan, s, i) for s, i in items.items()),
        _legend(end, {how for _, _, how in hops}),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arcs(plan: Plan) -> dict[tuple[Stop, Stop], str]:
    """What is drawn: local edges, edges into and out of moves, and orders without data."""
    arcs: dict[tuple[Stop, Stop], str] = {}
    for stop, hands in origins(plan).items():
        for hand in hands.values():
            arcs[hand, stop] = "move" if isinstance(hand, Move) or isinstance(stop, Move) else "local"
    data = {(e.writer, e.reader) for e in plan.edges}
    orders = ((a, n.id) for n in plan.flow.nodes for a in n.after if a != SOURCE)
    return arcs | {pair: "order" for pair in orders if pair not in data}


def _columns(plan: Plan, arcs: dict[tuple[Stop, Stop], str]) -> dict[Stop, int]:
    """Nodes of one depth share a column, save those whose move waits for another node of that depth."""
    depth = plan.flow.depth
    before: dict[Stop, list[Stop]] = {s: [a for a, b in arcs if b == s] for s in origins(plan)}
    reach: dict[Stop, int] = {SOURCE: -1}  # the greatest depth upstream
    for s, parents in before.items():
        reach[s] = max((depth[p] if p in depth else reach[p] for p in parents), default=-1)
    column: dict[Stop, int] = {}
    floor = [0] * (max(depth.values(), default=0) + 2)
    for d in range(len(floor)):
        column = {SOURCE: 0}
        for s, parents in before.items():
            column[s] = max([column[p] + 1 for p in parents] + [1 if isinstance(s, Move) else max(1, floor[depth[s]])])
        floor[d] = max((column[i] for i in depth if depth[i] == d and reach[i] < d), default=0)
    for m in reversed(plan.moves):  # a move happens when its first reader needs it
        column[m] = min(column[b] for a, b in arcs if a == m) - 1
    used = sorted(set(column.values()))
    return {s: used.index(c) for s, c in column.items()}


def _items(plan: Plan, lanes: list[frozenset[int]], columns: dict[Stop, int]) -> dict[Stop, _Item]:
    items: dict[Stop, _Item] = {}
    for s, column in columns.items():
        if isinstance(s, Move):
            src, dst = lanes.index(frozenset(s.src.layout.ranks)), lanes.index(frozenset(s.dst.layout.ranks))
            band, color = 2 * dst - (src < dst) + (src > dst), _FORE[src % len(_FORE)]
            fields = textwrap.wrap(names(s.fields), 20, break_long_words=False, break_on_hyphens=False)
            lines = [f"{s.id} · {human_bytes(s.expected_bytes)}", *fields]
        else:
            p = plan.partition_of(s)
            lane = lanes.index(frozenset(p.layout.ranks))
            band, color = 2 * lane, _FORE[lane % len(_FORE)]
            what = "loader" if s == SOURCE else kind(plan.flow.node(s))
            lines = [s, what, str(p.layout)] + ([f"balanced by {clean(p.balance)}"] if p.balance else [])
        width = max(_width(t, 11 if i else 13) for i, t in enumerate(lines)) + 22
        items[s] = _Item(column, band, color, lines, isinstance(s, str), width=width, height=_LINE * len(lines) + 13)
    return items


def _hops(items: dict[Stop, _Item], arcs: dict[tuple[Stop, Stop], str]) -> list[tuple[_Item, _Item, str]]:
    """Cut every arc into hops from column to column; arcs of one start and kind share their way."""
    ways: dict[tuple[Stop, str, int], _Item] = {}
    hops: dict[tuple[_Item, _Item], str] = {}
    for (a, b), how in arcs.items():
        last = items[a]
        for c in range(last.column + 1, items[b].column):
            way = ways.setdefault((a, how, c), _Item(c, last.band, last.color))
            hops[last, way] = how
            last = way
        hops[last, items[b]] = how
    for start, end in hops:
        start.after.append(end)
        end.before.append(start)
    return [(a, b, how) for (a, b), how in hops.items()]


def _place_x(items: list[_Item], x: float) -> float:
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


def _place_y(items: list[_Item], labels: list[float], y: float) -> list[tuple[float, float]]:
    """Order every stack so that few lines cross, then pull the lines straight. Returns the room of every band."""
    stacks: dict[tuple[int, int], list[_Item]] = defaultdict(list)
    for i in items:
        stacks[i.column, i.band].append(i)
    room: list[tuple[float, float]] = []
    for band in range(2 * len(labels) - 1):
        least = 0 if band % 2 else labels[band // 2]
        need = max([least, *(_height(s) for (_, b), s in stacks.items() if b == band)])
        room.append((y, y + need))
        y += need + _PAD + _GAP  # of every two neighbours one is a lane, which is padded
    for sweep in range(_SWEEPS):
        for (_, band), stack in sorted(stacks.items(), key=lambda s: s[0], reverse=bool(sweep % 2)):
            wanted = {i: sum(room[band]) / 2 for i in stack}
            for i in stack if sweep else ():
                near = i.after if sweep % 2 else i.before
                if sweep > _SWEEPS // 2:  # lines go straight on, boxes stand in the middle of their lines
                    near = i.before + i.after if i.lines else i.before
                if near:
                    wanted[i] = sum(n.y for n in near) / len(near)
            if sweep <= _SWEEPS // 2:
                stack.sort(key=wanted.__getitem__)
            _settle(stack, [wanted[i] for i in stack], *room[band])
    return room


def _height(stack: list[_Item]) -> float:
    return sum(i.height for i in stack) + _GAP * (len(stack) - 1)


def _settle(stack: list[_Item], wanted: list[float], top: float, bottom: float) -> None:
    """As near as can be to the wanted heights, in this order, without overlap (isotonic regression)."""
    starts = list(accumulate((i.height + _GAP for i in stack), initial=0.0))
    runs: list[tuple[float, int]] = []  # mean shift, how many items share it
    for i, start, w in zip(stack, starts, wanted, strict=False):
        shift, n = w - i.height / 2 - start, 1
        while runs and runs[-1][0] > shift:
            mean, m = runs.pop()
            shift, n = (shift * n + mean * m) / (n + m), n + m
        runs.append((shift, n))
    for i, start, shift in zip(stack, starts, (shift for shift, n in runs for _ in range(n)), strict=False):
        i.y = start + i.height / 2 + min(max(shift, top), bottom - _height(stack))


def _lane(label: list[str], n: int, room: tuple[float, float], width: float) -> str:
    (top, bottom), back, fore = room, _BACK[n % len(_BACK)], _FORE[n % len(_FORE)]
    size = f'width="{width - 2 * _MARGIN:.1f}" height="{bottom - top + 2 * _PAD:.1f}"'
    out = f'<rect class="lane" x="{_MARGIN}" y="{top - _PAD:.1f}" {size} rx="10" fill="{back}"/>'
    for k, t in enumerate(label, -len(label)):  # groups, and last the ranks
        y = (top + bottom) / 2 + _LINE * (k + (len(label) + 1) / 2) + 4
        out += _text(_MARGIN + 14, y, t, 11 if k == -1 else 13, fore, bold=k < -1)
    return out


def _line(a: _Item, b: _Item, how: str) -> str:
    ends = sorted(b.before, key=lambda i: i.y)
    spread = min(10.0, (b.height - 16) / len(ends)) if b.lines else 0.0
    y = b.y + (ends.index(a) - (len(ends) - 1) / 2) * spread
    color, head = (a.color if how == "move" else _GREY), (_ARROW if b.lines else 0)
    x0, x1 = a.bounds[1], b.bounds[0]
    bend = f"C{(x0 + x1) / 2:.1f},{a.y:.1f} {(x0 + x1) / 2:.1f},{y:.1f} {x1 - head:.1f},{y:.1f}"
    start, end = (a.x + a.width if a.lines else a.x), b.x - head
    path = f"M{start:.1f},{a.y:.1f}H{x0:.1f}{bend}H{end:.1f}"
    tip = f'<path d="M{end:.1f},{y - 4.5:.1f}l{head},4.5l-{head},4.5z" fill="{color}"/>' if head else ""
    return f'<path class="{how}" d="{path}" fill="none" stroke="{color}" {_LINES[how][0]}/>{tip}'


def _shape(plan: Plan, stop: Stop, i: _Item) -> str:
    """Box or pill; the box of a node that trains is filled."""
    train = isinstance(stop, str) and stop != SOURCE and plan.flow.node(stop).type == "train"
    ink, soft = (_WHITE, _WHITE) if train else (_INK if i.box else i.color, _SOFT)
    x, y = i.x + i.width / 2, i.y - i.height / 2
    texts = [_text(x, y + 18, i.lines[0], 13, ink, bold=True, middle=True)]
    texts += [_text(x, y + 18 + _LINE * k, t, 11, soft, middle=True) for k, t in enumerate(i.lines) if k]
    size = f'x="{i.x:.1f}" y="{y:.1f}" width="{i.width:.1f}" height="{i.height:.1f}" rx="{8 if i.box else 16}"'
    paint = f'fill="{i.color if train else _WHITE}" stroke="{i.color}" stroke-width="{1.5 if i.box else 2.5}"'
    return f'<g class="{"node" if i.box else "move"}"><rect {size} {paint}/>{"".join(texts)}</g>'


def _legend(y: float, used: set[str]) -> str:
    x, out = float(_MARGIN), ""
    for how in (how for how in _LINES if how in used):
        style, told = _LINES[how]
        color = _FORE[0] if how == "move" else _GREY
        out += f'<path d="M{x:.1f},{y - 4:.1f}h26" stroke="{color}" {style}/>' + _text(x + 33, y, told, 11, _SOFT)
        x += 33 + _width(told, 11) + 24
    return out


def _width(text: str, size: float) -> float:
    """An estimate that is wide enough for the fonts people have; headings are bold."""
    return cell_len(text) * size * (0.66 if size >= 13 else 0.6)


def _text(x: float, y: float, text: str, size: int, color: str, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="600"' * bold + ' text-anchor="middle"' * middle
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{style}>{escape(text)}</text>'
