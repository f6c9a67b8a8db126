"""What rank 0 shows and writes: JSON Lines always, a quiet live line on a terminal, plain lines elsewhere."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from distflow.observe.stragglers import Stragglers
from distflow.plan.units import human_bytes

SHOWN = 4  # metrics in the line, of these first
FIRST = ("reward/mean", "val/", "actor/loss", "response_length/mean", "actor/grad_norm")
APART = "rollout/mismatch_kl", 0.01  # and this one, if it is more: what generates is not what is trained


class Progress:
    """A metrics sink: called with the numbers of each step."""

    def __init__(
        self, folder: Path, steps: int, skipped: Sequence[str] = (), skipped_count: int = 0, first: int = 0
    ) -> None:
        """`first`: the step that a resumed run begins with; what was written of it and later is forgotten."""
        self.steps = steps
        self.console = Console()
        path = folder / "metrics.jsonl"
        for name in ("metrics.jsonl", "samples.jsonl"):
            _upto(folder / name, first) if first else _fresh(folder / name)
        self._log = open(path, "a", buffering=1)  # noqa: SIM115 (lives as long as this)
        if skipped_count:
            self._say(f"skipped {skipped_count} bad rows" + "".join(f"\n  {row}" for row in skipped))
            if skipped_count > len(skipped):
                self._say(f"  … and {skipped_count - len(skipped)} more")
        self._stragglers = Stragglers(folder / "workers")
        self._sums: dict[str, float] = {}
        self._seen = 0
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
            self._task = self._bar.add_task("", total=steps, completed=first)

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if "perf/tokens" in metrics and "timing_max_s/step" in metrics:
            metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / metrics["timing_max_s/step"]
        self._stragglers.look(step, metrics)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._log.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._seen += step >= 0
        for name, value in metrics.items() if step >= 0 else ():
            self._sums[name] = self._sums.get(name, 0.0) + value
        line = summary(metrics)
        if step < 0:
            self._say(f"{'before training' if self.steps else 'held out'}  {line}")
        elif self._bar:
            self._bar.update(self._task, advance=1, description=line)
        else:
            print(f"step {step + 1}/{self.steps}  {line}", flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        self._log.close()
        if self._seen:
            mean = {name: total / self._seen for name, total in self._sums.items()}
            self._say(closing(mean, self._seen))
            if told := self._stragglers.told():
                self._say(told)
            self._say(f"metrics: {self._log.name}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def summary(metrics: dict[str, float]) -> str:
    """The few numbers worth a glance."""
    parts = []
    if "timing_max_s/step" in metrics:
        parts.append(f"{metrics['timing_max_s/step']:.3g} s")
        parts.append(f"{human_bytes(metrics['data/bytes_sent_max'])} sent by the busiest worker")
    own = [k for k in metrics if k.partition("/")[0] not in ("timing_s", "timing_max_s", "data", "perf")]
    own.sort(key=lambda k: next((i for i, first in enumerate(FIRST) if k.startswith(first)), len(FIRST)))
    name, much = APART
    shown = own[:SHOWN] + [k for k in own[SHOWN:] if k == name and metrics[k] > much]
    parts += [f"{k} {metrics[k]:.4g}" for k in shown]
    return "  ".join(parts)


def closing(mean: dict[str, float], steps: int) -> str:
    """Where the time went and what moved, per step."""
    times = {k.removeprefix("timing_s/"): v for k, v in mean.items() if k.startswith("timing_s/")}
    whole = times.pop("step")
    parts = sorted(times.items(), key=lambda kv: -kv[1])
    lines = [f"{steps} steps, {whole:.3g} s each; a worker's time: " + ", ".join(f"{k} {v:.3g} s" for k, v in parts)]

    def flow(name: str) -> str:
        return f"{human_bytes(mean[f'data/{name}'])} (most {human_bytes(mean[f'data/{name}_max'])})"

    told = f"a worker's bytes a step: sent {flow('bytes_sent')}, received {flow('bytes_received')}"
    lines.append(f"{told}, handed over in place {flow('bytes_local')}")
    if "data/imbalance" in mean:
        lines.append(f"tokens per worker differ by {mean['data/imbalance']:.1%}")
    return "\n".join(lines)


def _fresh(path: Path) -> None:
    """A log of an earlier run keeps its place under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        n = next(n for n in range(1, 1 << 30) if not path.with_suffix(f".{n}.jsonl").exists())
        path.rename(path.with_suffix(f".{n}.jsonl"))


def _upto(path: Path, step: int) -> None:
    """Only the lines of earlier steps, and of those the whole ones."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] < step and line.endswith("\n"):
            kept.append(line)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.rename(path)
