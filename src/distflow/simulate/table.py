"""Shows a simulation in a terminal, or as plain text when piped: tasks, rank sets, comparisons."""

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distflow.plan.layout import ranks_text
from distflow.plan.table import headline, rank_set_names
from distflow.simulate.report import Report
from distflow.util.text import clean, human_bytes, seconds

_NUMBERS = {
    "seconds",
    "mean",
    "ends at",
    "bytes",
    "between hosts",
    "step",
    "memory",
    "compute",
    "communicate",
    "idle",
    "data plane",
}


def render(report: Report) -> RenderableType:
    """Returns the tables of a report."""
    title, numbers, *_ = headline(report.plan)
    result = report.result
    links = result.links
    lines = [
        f"step {seconds(result.step_s)} · {result.tokens_per_worker_s:,.0f} response tokens per worker and second"
        f" · data plane {seconds(result.data_plane_s)}",
        f"links: {human_bytes(links.busiest)} through that of the busiest {links.per}, {links.ratio:.2f} × the mean"
        f" · control: {result.messages:,.0f} messages and {seconds(result.control_cpu_s)} of CPU a worker, at most",
    ]
    if report.drawn:
        p = report.percentiles
        spread = ", ".join(f"{100 * q:g} % within {seconds(p[f'p{100 * q:g}'])}" for q in (0.05, 0.5, 0.95))
        lines.append(f"{len(report.drawn)} steps with lengths and devices drawn anew: {spread}")
    return Group(
        Text(f"{title} on {report.hardware.name}: {report.hardware.about}", "bold"),
        Text(numbers),
        *map(Text, lines),
        Text(),
        _tasks(report),
        Text(),
        _rank_sets(report),
        Text(),
        _comparison(report),
        *((Text(), _candidates(report)) if report.candidates else ()),
        *(Text(f"{'the first, ' if r.startswith('beside') else ''}{clean(r)}") for r in report.reasons),
        *((Text(), _failures(report)) if report.survival else ()),
        Text(),
        *(Text(f"assumed: {clean(a)}", "dim") for a in report.assumptions),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for c in columns:
        table.add_column(c, overflow="fold", justify="right" if c in _NUMBERS else "left")
    return table


def _tasks(report: Report) -> Table:
    table = _table("Tasks", "task", "seconds", "mean", "ends at", "bytes", "between hosts")
    for t in report.result.tasks:
        if t.elapsed_s or t.bytes:
            sizes = [human_bytes(t.bytes) if t.bytes else "", human_bytes(t.network_bytes) if t.network_bytes else ""]
            style = "bold" if t.kind == "run" else "cyan"
            row = [seconds(t.elapsed_s), seconds(t.mean_busy_s), seconds(t.end_s), *sizes]
            table.add_row(Text(clean(t.name), style), *row)
    return table


def _rank_sets(report: Report) -> Table:
    table = _table("Rank sets", "ranks", "compute", "communicate", "idle", "memory")
    for r in report.result.rank_sets:
        names = "/".join(rank_set_names(report.plan, r.ranks))
        shares = [f"{100 * share:.1f} %" for share in (r.compute, r.communicate, r.idle)]
        table.add_row(Text(f"{names} {ranks_text(r.ranks)}".strip()), *shares, human_bytes(r.memory.peak))
    return table


def _comparison(report: Report) -> Table:
    table = _table("Compared with", "", "step", "data plane", "memory", "")
    result, driver = report.result, report.controller
    memory = human_bytes(max(r.memory.peak for r in result.rank_sets))
    table.add_row("this plan", seconds(result.step_s), seconds(result.data_plane_s), memory)
    table.add_row(
        "one controller",
        seconds(driver.step_s),
        seconds(driver.data_plane_s),
        f"{human_bytes(driver.memory)} in the driver",
        f"{report.speedup:.2f} × this; survives {driver.largest_batch:,} prompts",
    )
    if report.overlap:
        forecast = f"rank sets {report.overlap:g} steps apart"
        table.add_row(f"{forecast} (forecast)", seconds(report.forecast(result)), "", "")
    for c in report.alternatives:
        table.add_row(c.name, seconds(c.result.step_s), seconds(c.result.data_plane_s), human_bytes(c.memory))
    return table


def _failures(report: Report) -> Table:
    title = "Time that is useful if hosts fail, by the steps between checkpoints"
    table = _table(title, "workers", "a failure every", "useful", "best", "useful then", "Young", "Daly")
    for g in report.survival:
        every = "never" if math.isinf(g.mean_time_s) else seconds(g.mean_time_s)
        young, daly = ("" if math.isinf(s) else seconds(s) for s in (g.young_s, g.daly_s))
        now = f"{100 * g.goodput:.1f} % (every {g.every})"
        table.add_row(f"{g.workers:,}", every, now, f"every {g.best_every:,}", f"{100 * g.best:.1f} %", young, daly)
    return table


def _candidates(report: Report) -> Table:
    title = "Placements that fit" + (f", with a forecast of {report.overlap:g} steps apart" if report.overlap else "")
    table = _table(title, "placement", "step", "memory", "idle")
    for c in report.candidates:
        rank_sets = c.result.rank_sets
        step = report.forecast(c.result) if report.overlap else c.result.step_s
        idle = sum(r.idle * len(r.ranks) for r in rank_sets) / report.plan.workers
        table.add_row(c.name, seconds(step), human_bytes(c.memory), f"{100 * idle:.1f} %")
    return table
