"""Lists the runs below a folder: their state, their last score, and how to go on with them."""

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.errors import ConfigError
from distflow.page.run_folder import RunFolder, is_run
from distflow.run_folder import CHECKPOINTS, CONFIG, EARLIER, METRICS, RUN, SAMPLES, SPANS, WORKERS
from distflow.util.text import ago

if TYPE_CHECKING:
    from rich.table import Table

DEPTH = 4  # folders below the given one
NOT_RUNS = (CHECKPOINTS, SPANS, SAMPLES, WORKERS)


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[RunFolder]:
    """Yields the runs in a folder and below, in the order of their names."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; give one with runs in it, such as runs")
    if (folder / CONFIG).exists() and any((folder / name).exists() for name in (METRICS, SPANS)):  # or a simulated step
        yield RunFolder(folder)
        if (folder / EARLIER).is_dir():
            yield from find_runs(folder / EARLIER, 1)
        return
    for inner in sorted(folder.iterdir()) if depth else []:
        if inner.is_dir() and not inner.is_symlink() and inner.name not in NOT_RUNS:
            yield from find_runs(inner, depth - 1)


def runs_at(path: Path) -> list[RunFolder]:
    """Returns the run of a folder, or the runs in it and below."""
    if is_run(path):
        return [RunFolder(path)]
    if runs := list(find_runs(path)):
        return runs
    raise ConfigError(f"{path}: is not the folder of a run, and there is none in it; give one, such as runs/grpo")


def run_row(run: RunFolder) -> dict[str, Any]:
    """Returns the row of a run in a list of runs."""
    state, about, config = run.state(), run.read_json(RUN), run.config()
    return {
        "name": run.name,
        "path": str(run.path),
        **{key: state[key] for key in ("state", "step", "steps", "last")},
        "started": about.get("started"),
        "workers": about.get("workers") or len(run.ranks()) or None,
        "flow": config.get("flow") if isinstance(config.get("flow"), str) else None,
        "score": last_score(run.rows()),
        "continue": resume(run, state["state"]),
    }


def runs_table(folder: Path) -> "Table":
    """Returns the table that `distflow runs` prints."""
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "state", "step", "score", "last heard of", "continue with", box=None, pad_edge=False)
    for row in map(run_row, find_runs(folder)):
        table.add_row(
            Text(row["path"], overflow="fold"),
            row["state"],
            "–" if row["step"] is None else f"{row['step']}" + (f"/{row['steps']}" if row["steps"] else ""),
            Text(row["score"]),
            ago(time.time() - row["last"]) if row["last"] else "–",
            Text(row["continue"], overflow="fold"),
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
    if state in ("running", "finished", "simulated"):
        return ""
    if not run.checkpoints():
        return "no checkpoint"
    return " ".join(["distflow", *_run_again(run), "--resume"])


def _run_again(run: RunFolder) -> list[str]:
    """Returns the words that started a run; where its config is gone, as of a run from Python, with its own copy."""
    about = run.read_json(RUN)
    command = about.get("command")
    words = [str(w) for w in command[1:]] if isinstance(command, list) else []
    if words[:1] == ["run"] and any((Path(about.get("folder", ".")) / w).is_file() for w in words[1:]):
        return [w for w in words if not w.startswith("--resume")]
    base = ["--relative-to", str(about["base"])] if "base" in about else []
    return ["run", f"{run.path}/{CONFIG}", *base]
