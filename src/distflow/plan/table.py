"""Shows a plan in a terminal, or as plain text when piped: headline, nodes, moves, and the chain of every rank."""

from collections.abc import Iterable
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from distflow.flow.graph import SOURCE, Node
from distflow.plan.layout import Layout, ranks_text
from distflow.plan.tasks import Free, Load, Merge, Move, Plan, Resample, RunNode, Split, SyncWeights, Task, chunk_of
from distflow.util.text import clean, human_bytes, names


def render(plan: Plan) -> RenderableType:
    """Returns the tables of a plan; they wrap to the width of the console and never cut a name."""
    title, *lines = headline(plan)
    tables = [_nodes(plan), _moves(plan), _weights(plan), _chains(plan)]
    parts = [part for table in tables if table for part in (Text(), table)]
    return Group(Text(title, "bold"), *map(Text, lines), *parts)


def html(plan: Plan) -> str:
    """Returns the same tables for a notebook."""
    console = Console(record=True, width=140, file=StringIO())
    console.print(render(plan))
    style = "white-space: pre; overflow-x: auto; line-height: 1.2; font-family: monospace"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def origins(plan: Plan) -> dict[str | Move, dict[str, str | Move]]:
    """Returns for each node and each move: field → its origin, a move or (if local) the node that wrote it."""
    latest: dict[tuple[str, str], str | Move] = {}
    origins: dict[str | Move, dict[str, str | Move]] = {}
    for t in (t for t in plan.tasks if not _is_repeated(t)):
        match t:
            case Split() | Merge():
                parts = [(t.partition, t.parts[0])] if isinstance(t, Split) else [(t.parts[0], t.partition)]
                fields = t.fields if isinstance(t, Split) else t.kept
                latest.update(((dst.id, f), latest[src.id, f]) for src, dst in parts for f in fields)
            case Load():
                latest.update(((t.partition.id, f), SOURCE) for f in t.fields)
            case Move():
                origins[t] = {f: latest[t.src.id, f] for f in t.fields}
                latest.update(((t.dst.id, f), t) for f in t.fields)
            case RunNode():
                origins[t.node] = {f: latest[t.partition.id, f] for f in t.reads}
                latest.update(((t.partition.id, f), t.node) for f in t.writes)
            case Resample():
                latest.update(((dst.id, f), latest[src.id, f]) for src, dst, fields in t.carried for f in fields)
    return origins


def _is_repeated(t: Task) -> bool:
    """Returns whether a task repeats that of the first chunk for a further chunk."""
    return bool(chunk_of(t))


def shown_moves(plan: Plan) -> tuple[Move, ...]:
    """Returns the moves of a step, without the repetitions for further chunks."""
    return tuple(m for m in plan.moves if not _is_repeated(m))


def rank_set_names(plan: Plan, ranks: Iterable[int]) -> list[str]:
    """Returns the names of the rank sets that consist of exactly these ranks."""
    wanted = set(ranks)
    return [clean(name) for name, r in plan.rank_sets.items() if len(r) == len(wanted) and wanted.issuperset(r)]


def headline(plan: Plan) -> tuple[str, ...]:
    """Returns the title, the numbers and the rank sets of a plan; and, with staleness, the ranks that run ahead."""
    moved = human_bytes(sum(m.expected_bytes for m in plan.moves))
    replicas = max(p.layout.dp for p in plan.partitions)
    numbers = (
        _count(plan.workers, "worker"),
        f"{_count(plan.samples, 'sample')} per step, {plan.repeat} per prompt",
        *([f"{replicas - plan.samples} of {replicas} replicas have none"] if plan.samples < replicas else []),
        _count(len(plan.flow.nodes), "node"),
        f"{_count(len(plan.moves), 'move')}, {moved} per step" if plan.moves else "no moves",
        f"plan {plan.hash[:8]}",
    )
    rank_sets = " · ".join(f"{clean(name)} {ranks_text(ranks)}" for name, ranks in plan.rank_sets.items())
    ahead = [staleness_text(plan)] if plan.staleness else []
    if plan.prompts_ahead:
        count = _count(plan.prompts_ahead, "prompt")
        ahead.append(f"partial rollouts: while the responses of a step are generated, {count} of later steps may begin")
    if plan.chunks > 1:
        by_chunk = dict.fromkeys(t.node for t in plan.tasks if isinstance(t, RunNode) and t.partition.chunk)
        ahead.append(f"{plan.chunks} chunks per step: {names(by_chunk)} run chunk by chunk, while others are generated")
    return clean(plan.flow.name), " · ".join(numbers), f"rank sets: {rank_sets}", *ahead


def staleness_text(plan: Plan) -> str:
    """Returns a description of the work of generating ranks while the others train."""
    ahead = tuple(sorted(plan.ahead))
    others = tuple(r for r in range(plan.workers) if r not in plan.ahead)
    return (
        f"staleness {plan.staleness}: while {_ranks(plan, others)} run step k, {_ranks(plan, ahead)} generate as far as"
        f" step k+{plan.staleness}, each step with the weights of {plan.staleness} before"
    )


def role_and_type(n: Node) -> str:
    return clean(n.role) if n.role == n.type else f"{clean(n.role)} · {n.type}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _ranks(plan: Plan, ranks: tuple[int, ...]) -> str:
    return " ".join(("/".join(rank_set_names(plan, ranks)), ranks_text(ranks))).strip()


def _layout(plan: Plan, layout: Layout) -> str:
    return f"{_ranks(plan, layout.ranks)} {layout}"


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
    sources = origins(plan)
    table = _table("Nodes, in order", "node", "role · type", "runs on", "reads", "writes")
    loader = _layout(plan, plan.partition_of(SOURCE).layout)
    table.add_row(Text(SOURCE, "bold"), "loader", Text(loader), "", Text(names(plan.flow.source)))
    for n in plan.flow.order:
        fields: dict[str, list[str]] = {}
        for f, source in sources[n.id].items():
            fields.setdefault(source.id if isinstance(source, Move) else "local", []).append(f)
        reads = [Text.assemble((f"{w}: ", "dim" if w == "local" else "cyan"), names(fs)) for w, fs in fields.items()]
        after = Text(f"after {names(n.after)}" if n.after else "", "dim")
        layout = _layout(plan, plan.partition_of(n.id).layout)
        table.add_row(
            Text(n.id, "bold"), Text(role_and_type(n)), Text(layout), _lines(*reads, after), Text(names(n.writes))
        )
    return table


def _moves(plan: Plan) -> Table | Text:
    if not plan.moves:
        return Text("No moves: all fields are read where they are written.")
    sources = origins(plan)
    table = _table("Moves", "move", "fields", "from", "to", "expected", "assignment")
    for m in shown_moves(plan):
        senders = dict.fromkeys(s.id if isinstance(s, Move) else s for s in sources[m].values())
        receivers = [r.id if isinstance(r, Move) else r for r, fields in sources.items() if m in fields.values()]
        ends = [
            _lines(names(ids), Text(_layout(plan, p.layout), "dim"))
            for ids, p in ((senders, m.src), (receivers, m.dst))
        ]
        requirements = ["whole groups"] * m.dst.whole_groups
        requirements += [f"balanced by {clean(m.dst.balance)}"] if m.dst.balance else []
        assignment = (", ".join(requirements) or "even counts") if m.assigns else "–"
        expected = human_bytes(m.expected_bytes)
        table.add_row(Text(m.id, "cyan"), Text(names(m.fields)), *ends, expected, Text(assignment))
    return table


def _weights(plan: Plan) -> Table | None:
    """Returns the table of weight syncs, None without any."""
    tasks = dict.fromkeys(t for t in plan.tasks if isinstance(t, SyncWeights))
    table = _table("Weights, synced before each generation", "role", "from", "to", "expected")
    for t in tasks:
        ends = [Text(_layout(plan, layout) if layout else "where it is, untrained") for layout in (t.source, t.target)]
        table.add_row(Text(t.role, "bold"), *ends, weight_bytes(t))
    return table if tasks else None


def weight_bytes(t: SyncWeights) -> str:
    """Formats the bytes of a weight sync."""
    return "model not known here" if t.expected_bytes is None else human_bytes(t.expected_bytes)


def _chains(plan: Plan) -> Table:
    table = _table("Chains   ⇢ send  ⇠ receive  ⇄ both", "ranks", "tasks of each rank")
    for ranks, tasks in plan.chains().items():
        chain = Text(" → ", "dim").join(_task(t, ranks[0]) for t in tasks if not _is_repeated(t))
        table.add_row(Text(_ranks(plan, ranks)), chain if tasks else Text("none: no node is placed here", "yellow"))
    return table


def _task(t: Task, rank: int) -> Text:
    match t:
        case Move():
            sends, receives = t.src.layout.replica_of(rank) is not None, t.dst.layout.replica_of(rank) is not None
            return Text(("⇄" if sends and receives else "⇢" if sends else "⇠") + t.id, "cyan")
        case Free():
            return Text(f"free {names(t.fields)}", "dim")
        case Load() | RunNode():
            return Text(t.name, "bold")
        case SyncWeights():
            return Text(t.name + (f" of step k−{t.delay}" if t.delay else ""), "cyan")
        case Split() | Merge():
            return Text(t.name, "cyan")
        case Resample():
            return Text(f"↺ up to {t.rounds} times", "cyan")
