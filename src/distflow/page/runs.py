"""Lists the runs below a folder: their state, their last score, and how to go on with them."""

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.errors import ConfigError
from distflow.page.run_folder import RunFolder
from distflow.run_folder import CHECKPOINTS, CONFIG, METRICS, RUN, SAMPLES, SPANS, WORKERS
from distflow.util.text import ago

if TYPE_CHECKING:
    from rich.table import Table

DEPTH = 4  # folders below the given one
NOT_RUNS = (CHECKPOINTS, SPANS, SAMPLES, WORKERS)


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[RunFolder]:
    """Yields the runs in a folder and below, in the order of their names."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; give one with runs in it, such as runs")
    if (folder / CONFIG).exists() and (folder / METRICS).exists():
        yield RunFolder(folder)
        return
    for inner in sorted(folder.iterdir()) if depth else []:
        if inner.is_dir() and not inner.is_symlink() and inner.name not in NOT_RUNS:
            yield from find_runs(inner, depth - 1)


def runs_table(folder: Path) -> "Table":
    """Returns the table that `distflow runs` prints."""
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "state", "step", "score", "last heard of", "continue with", box=None, pad_edge=False)
    for run in find_runs(folder):
        state = run.state()
        table.add_row(
            Text(str(run.path), overflow="fold"),
            state["state"],
            "–" if state["step"] is None else f"{state['step']}" + (f"/{state['steps']}" if state["steps"] else ""),
            Text(last_score(run.rows())),
            ago(time.time() - state["last"]) if state["last"] else "–",
            Text(resume(run, state["state"]), overflow="fold"),
        )
    return table


def last_score(rows: list[dict[str, Any]]) -> str:
    """Returns the newest held-out score, else the mean reward, with its name."""
    for pattern in ("val/*/score", "reward/mean"):
        for row in reversed(rows):
            for name, value in row.items():
                if fnmatchcase(name, pattern) and value is not None:
                    return f"{name} {value:.4g}"
    return "–"


def resume(run: RunFolder, state: str) -> str:
    """Returns the command that continues a run, empty if it needs none or has no checkpoint."""
    newest = max((int(n) for p in (run.path / CHECKPOINTS).glob("step_*") if (n := p.name[5:]).isdigit()), default=None)
    if state in ("running", "finished", "simulated"):
        return ""
    if newest is None:
        return "no checkpoint"
    return " ".join(["distflow", *_run_again(run), "--resume"])


def _run_again(run: RunFolder) -> list[str]:
    """Returns the words that started a run; where its config is gone, as of a run from Python, those with its own."""
    about = run.read_json(RUN)
    command = about.get("command")
    words = [str(w) for w in command[1:]] if isinstance(command, list) else []
    if words[:1] == ["run"] and any((Path(about.get("folder", ".")) / w).is_file() for w in words[1:]):
        return [w for w in words if not w.startswith("--resume")]
    base = ["--relative-to", str(about["base"])] if "base" in about else []
    return ["run", f"{run.path}/{CONFIG}", *base]
