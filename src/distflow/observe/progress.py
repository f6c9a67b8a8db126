"""What rank 0 shows and writes: JSON Lines always, a quiet live line on a terminal, plain lines elsewhere."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from distflow.plan.units import human_bytes

SHOWN = 4  # metrics of the user's own in the line


class Progress:
    """A metrics sink: called with the numbers of each step."""

    def __init__(self, folder: Path, steps: int, skipped: Sequence[str] = ()) -> None:
        self.steps = steps
        self.console = Console(stderr=False)
        self._log = open(_fresh(folder / "metrics.jsonl"), "w", buffering=1)  # noqa: SIM115 (lives as long as this)
        for row in skipped:
            self.console.print(f"skipped {row}", highlight=False, markup=False)
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=self.console)
            self._bar.start()
            self._task = self._bar.add_task("", total=steps)

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self._log.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        line = summary(metrics)
        if self._bar:
            self._bar.update(self._task, advance=1, description=line)
        else:
            print(f"step {step + 1}/{self.steps}  {line}", flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        self._log.close()


def summary(metrics: dict[str, float]) -> str:
    """The few numbers worth a glance."""
    parts = [f"{metrics['timing_max_s/step']:.3g} s"]
    parts.append(f"{human_bytes(metrics['data/bytes_sent_max'])} sent by the busiest worker")
    own = [k for k in metrics if k.partition("/")[0] not in ("timing_s", "timing_max_s", "data")]
    parts += [f"{k} {metrics[k]:.4g}" for k in own[:SHOWN]]
    return "  ".join(parts)


def _fresh(path: Path) -> Path:
    """A log of an earlier run keeps its place under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        n = next(n for n in range(1, 1 << 30) if not path.with_suffix(f".{n}.jsonl").exists())
        path.rename(path.with_suffix(f".{n}.jsonl"))
    return path
