"""The table of a first hour: what was predicted beside what was measured."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from distflow.errors import printable
from distflow.first_hour.check import Report, Result, values
from distflow.util.files import write_atomically
from distflow.util.text import human_bytes

TEXT = "report.txt"
_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "GiB": ("memory_gib", lambda x: f"{x:.3g}"),
    "kernels": ("kernels", lambda x: f"{x:,.0f}"),
    "tokens/s": ("tokens_per_s", lambda x: f"{x:,.0f}"),
    "mismatch": ("mismatch", lambda x: f"{x:.2g}"),
}
_WIDTH = 120
_REASON = 400  # characters of why a step has failed


def render(report: Report) -> Group:
    facts, notes = report.facts, list[Text]()
    device = "no device"
    if facts:
        size = f", {human_bytes(facts['memory'])} each" if facts["memory"] else ""
        device = f"{facts['workers']} × {facts['name']}{size}"
    table = Table(title=f"{device}; predicted / measured, of a mismatch allowed / measured", title_justify="left")
    for name in ("step", "", "seconds", *_COLUMNS):
        table.add_column(name, justify="left" if name in ("step", "") else "right", no_wrap=True)
    for r in report.results:
        cells = [_pair(*values(r.numbers, key), show) for key, show in _COLUMNS.values()]
        table.add_row(r.step, r.status, f"{r.seconds:.0f}", *cells)
        if r.reason:
            notes.append(Text(f"{r.step}: {_last(r)}"))
    return Group(table, *notes)


def write_text(report: Report, folder: Path) -> None:
    text = StringIO()
    Console(file=text, width=_WIDTH).print(render(report))
    write_atomically(folder / TEXT, text.getvalue())


def say(result: Result) -> None:
    """Prints a step that is done."""
    reason = f": {_last(result)}" if result.reason else ""
    print(printable(f"{result.step:<32} {result.status:<8} {result.seconds:6.0f} s{reason}"), flush=True)


def _last(result: Result) -> str:
    """Returns the last line of why a step has failed; all lines are in the report's JSON."""
    return result.reason.strip().splitlines()[-1][-_REASON:]


def _pair(predicted: Any, measured: Any, show: Callable[[float], str]) -> str:
    if predicted is None and measured is None:
        return ""
    return " / ".join("–" if x is None else show(x) for x in (predicted, measured))
