"""Show a plan in a terminal, or as plain text when piped: headline, nodes, moves, and the chain of every rank."""

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distflow.flow.graph import SOURCE, Node
from distflow.plan.layout import Layout
from distflow.plan.tasks import Free, Load, Move, Plan, Refill, Run, Task, Weights
from distflow.plan.units import clean, human_bytes, names, ranks_text


def render(plan: Plan) -> RenderableType:
    """Everything there is to know about a plan; wraps to the width of the console, never cuts a name."""
    title, *said = headline(plan)
    return Group(
        Text(title, "bold"), *map(Text, said), Text(), _nodes(plan), Text(), _moves(plan), Text(), _chains(plan)
    )


def origins(plan: Plan) -> dict[str | Move, dict[str, str | Move]]:
    """Per node and per move: field → what hands it over, a move or, where it is local, the node that wrote it."""
    at: dict[tuple[str, str], str | Move] = {}
    found: dict[str | Move, dict[str, str | Move]] = {}
    for t in plan.tasks:
        match t:
            case Load():
                at.update(((t.partition.id, f), SOURCE) for f in t.fields)
            case Move():
                found[t] = {f: at[t.src.id, f] for f in t.fields}
                at.update(((t.dst.id, f), t) for f in t.fields)
            case Run():
                found[t.node] = {f: at[t.partition.id, f] for f in t.reads}
                at.update(((t.partition.id, f), t.node) for f in t.writes)
            case Refill():
                at.update(((dst.id, f), at[src.id, f]) for src, dst, fields in t.carried for f in fields)
    return found


def group_names(plan: Plan, ranks: Iterable[int]) -> list[str]:
    """The groups that are exactly these ranks."""
    wanted = set(ranks)
    return [clean(g) for g, r in plan.groups.items() if len(r) == len(wanted) and wanted.issuperset(r)]


def headline(plan: Plan) -> tuple[str, str, str]:
    """Title, numbers, groups."""
    moved = human_bytes(sum(m.expected_bytes for m in plan.moves))
    numbers = (
        _count(plan.workers, "worker"),
        f"{_count(plan.samples, 'sample')} per step, {plan.repeat} per prompt",
        _count(len(plan.flow.nodes), "node"),
        f"{_count(len(plan.moves), 'move')}, {moved} per step" if plan.moves else "no moves",
        f"plan {plan.hash[:8]}",
    )
    groups = " · ".join(f"{clean(g)} {ranks_text(r)}" for g, r in plan.groups.items())
    return clean(plan.flow.name), " · ".join(numbers), f"groups: {groups}"


def kind(n: Node) -> str:
    return clean(n.role) if n.role == n.type else f"{clean(n.role)} · {n.type}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _who(plan: Plan, ranks: tuple[int, ...]) -> str:
    return " ".join(("/".join(group_names(plan, ranks)), ranks_text(ranks))).strip()


def _where(plan: Plan, layout: Layout) -> str:
    return f"{_who(plan, layout.ranks)} {layout}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for c in columns:
        table.add_column(c, overflow="fold", justify="right" if c == "expected" else "left")
    return table


def _lines(*lines: str | Text) -> Text:
    return Text("\n").join(Text(line) if isinstance(line, str) else line for line in lines if line)


def _nodes(plan: Plan) -> Table:
    hands = origins(plan)
    table = _table("Nodes, in order", "node", "role · type", "runs on", "reads", "writes")
    source = _where(plan, plan.partition_of(SOURCE).layout)
    table.add_row(Text(SOURCE, "bold"), "loader", Text(source), "", Text(names(plan.flow.source)))
    for n in plan.flow.order:
        by: dict[str, list[str]] = {}
        for f, hand in hands[n.id].items():
            by.setdefault(hand.id if isinstance(hand, Move) else "local", []).append(f)
        reads = [Text.assemble((f"{w}: ", "dim" if w == "local" else "cyan"), names(fs)) for w, fs in by.items()]
        after = Text(f"after {names(n.after)}" if n.after else "", "dim")
        on = _where(plan, plan.partition_of(n.id).layout)
        table.add_row(Text(n.id, "bold"), Text(kind(n)), Text(on), _lines(*reads, after), Text(names(n.writes)))
    return table


def _moves(plan: Plan) -> Table | Text:
    if not plan.moves:
        return Text("No moves: every input is where it is read.")
    hands = origins(plan)
    table = _table("Moves", "move", "fields", "from", "to", "expected", "deals")
    for m in plan.moves:
        givers = dict.fromkeys(h.id if isinstance(h, Move) else h for h in hands[m].values())
        takers = [t.id if isinstance(t, Move) else t for t, got in hands.items() if m in got.values()]
        sides = [
            _lines(names(ids), Text(_where(plan, p.layout), "dim")) for ids, p in ((givers, m.src), (takers, m.dst))
        ]
        wishes = ["whole groups"] * m.dst.whole + [f"balanced by {clean(f)}" for f in (m.dst.balance,) if f]
        deals = ", ".join(wishes) or "even counts"
        expected = human_bytes(m.expected_bytes)
        table.add_row(Text(m.id, "cyan"), Text(names(m.fields)), *sides, expected, Text(deals if m.deals else "–"))
    return table


def _chains(plan: Plan) -> Table:
    table = _table("Chains   ⇢ send  ⇠ receive  ⇄ both", "ranks", "each of them does")
    for ranks, tasks in plan.chains().items():
        chain = Text(" → ", "dim").join(_step(t, ranks[0]) for t in tasks)
        table.add_row(Text(_who(plan, ranks)), chain if tasks else Text("nothing: no node is placed here", "yellow"))
    return table


def _step(t: Task, rank: int) -> Text:
    match t:
        case Move():
            sends, receives = t.src.layout.cell_of(rank) is not None, t.dst.layout.cell_of(rank) is not None
            return Text(("⇄" if sends and receives else "⇢" if sends else "⇠") + t.id, "cyan")
        case Free():
            return Text(f"free {names(t.fields)}", "dim")
        case Load() | Run():
            return Text(t.name, "bold")
        case Weights():
            return Text(t.name, "cyan")
        case Refill():
            return Text(f"↺ up to {t.rounds} times", "cyan")
