"""Shows and writes the metrics on rank 0: JSON Lines, and a progress bar on a terminal, plain lines elsewhere."""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from distflow.errors import printable
from distflow.observe.bounded_log import UNLIMITED, BoundedLog
from distflow.observe.findings import LONGER, RECENT, findings
from distflow.observe.stragglers import Stragglers
from distflow.observe.trackers.thread import TrackerThread
from distflow.run_folder import METRICS, STATE, SUSPICIOUS
from distflow.util.lines import row_step
from distflow.util.patient_files import WholeFiles, WriteErrors
from distflow.util.text import duration, human_bytes

SHOWN = 4  # metrics in a step's line, in the order of PREFERRED
PREFERRED = ("reward/mean", "val/", "actor/loss", "response_length/mean", "actor/grad_norm")
# Always shown above these values: rollout and trainer differ; rewards, or updates, have failed.
ALARMS = {"rollout/mismatch_kl": 0.01, "reward/failures": 0, "actor/skipped_updates": 0, "critic/skipped_updates": 0}


class Progress:
    """A metrics sink: called with the metrics of each step."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        skipped: Sequence[str] = (),
        skipped_count: int = 0,
        first: int = 0,
        hosts: Sequence[str] = (),
        trackers: Sequence[TrackerThread] = (),
        files: WholeFiles | None = None,
    ) -> None:
        """`first`: the step after which a resumed run continues; lines of later steps are removed from the logs.
        `hosts`: the name of each rank's host. `files`: further ones to try again if they could not be written."""
        self.steps, self.trackers, self.folder, self.files = steps, trackers, folder, files or WholeFiles()
        self.console = Console()
        self._output = WriteErrors("the output of the run", counts_losses=False)
        self._log = BoundedLog(folder / METRICS, UNLIMITED, row_step)
        if first:  # each worker truncates its own spans and samples
            suspicious = BoundedLog(folder / SUSPICIOUS, UNLIMITED, row_step)
            if suspicious.path.exists():
                suspicious.open(first)
                suspicious.close()
        self._log.open(first)
        self._write_state("running")
        if skipped_count:
            self._print(f"skipped {skipped_count} bad rows" + "".join(f"\n  {row}" for row in skipped))
            if skipped_count > len(skipped):
                self._print(f"  … and {skipped_count - len(skipped)} more")
        self._stragglers = Stragglers(hosts)
        self._sums: dict[str, float] = {}
        self._recent: list[dict[str, float | None]] = []  # metrics of the last steps
        self._ends = deque[float](maxlen=RECENT + 1)  # when the last steps ended
        self._warned: set[str] = set()  # metrics that the last step's warnings are about
        self._count = 0
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
        self._stragglers.update(step, metrics)
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self._log.append([json.dumps({"step": step, "time": time.time(), **finite}).encode() + b"\n"])
        self.files.retry()
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self._warn(step, finite)
        trained = 0 < step <= self.steps
        self._count += trained
        for name, value in metrics.items() if trained else ():
            self._sums[name] = self._sums.get(name, 0.0) + value
        line = step_line(metrics)
        if trained and not self._bar and (left := self._left(step, metrics)):
            line = f"{left}  {line}"
        if not trained:
            self._print(f"{'before training' if self.steps else f'held out, step {step}'}  {line}")
        elif self._bar:
            self._bar.update(self._task, advance=1, description=line)
        else:
            self._say(lambda: print(f"step {step}/{self.steps}  {line}", flush=True))

    def _left(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Returns how long the rest of the steps will take, as the last ones did."""
        self._ends.append(time.monotonic())
        passed = len(self._ends) - 1
        each = (self._ends[-1] - self._ends[0]) / passed if passed else metrics.get("timing_max_s/step")
        return None if each is None or step == self.steps else f"{duration((self.steps - step) * each)} left"

    def on_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Tells the trackers of samples that this worker has recorded."""
        for tracker in self.trackers:
            tracker.samples(step, rows)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        self._log.close()
        self._write_state("ended")
        for tracker in self.trackers:
            tracker.close()
        if self._count:
            means = {name: total / self._count for name, total in self._sums.items()}
            self._print(run_summary(means, self._count))
            if line := self._stragglers.summary():
                self._print(line)
            self._print(f"metrics: {self._log.path}; see it all: distflow show {self.folder}")
        self.files.close()
        self._output.close()

    def _warn(self, step: int, metrics: dict[str, float | None]) -> None:
        """Warns once when a condition starts; again only after it cleared."""
        self._recent = [*self._recent, {"step": step, **metrics}][-LONGER:]
        found = findings(self._recent) if step else []
        for finding in found:
            if finding.metric not in self._warned:
                self._print(f"warning, step {step}: {finding.text}")
        self._warned = {finding.metric for finding in found}

    def _write_state(self, state: str) -> None:
        """Records how many steps the run has; a run that is killed never records that it has ended."""
        text = json.dumps({"state": state, "steps": self.steps, "time": time.time()}) + "\n"
        self.files.write(self.folder / STATE, text)

    def _print(self, text: str) -> None:
        self._say(lambda: self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True))

    def _say(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as e:  # the output may be a file on a full disk, or a pipe without a reader
            self._output.failed(e)
        else:
            self._output.succeeded()


def step_line(metrics: dict[str, float]) -> str:
    """Returns the few metrics of a step that are worth a glance."""
    parts = []
    if "timing_max_s/step" in metrics:
        parts.append(f"{metrics['timing_max_s/step']:.3g} s")
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{metrics['perf/tokens_per_s']:,.0f} tokens/s")
    names = [k for k in metrics if k.partition("/")[0] not in ("timing_s", "timing_max_s", "data", "perf")]
    names.sort(key=lambda k: not k.endswith("/score"))  # before what else is known of the same source
    names.sort(key=lambda k: next((i for i, prefix in enumerate(PREFERRED) if k.startswith(prefix)), len(PREFERRED)))
    names = names[:SHOWN] + [k for k in names[SHOWN:] if metrics[k] > ALARMS.get(k, math.inf)]
    parts += [f"{k} {metrics[k]:.4g}" for k in names]
    return "  ".join(parts)


def run_summary(means: dict[str, float], steps: int) -> str:
    """Returns where the time of a step went and what moved."""
    times = {k.removeprefix("timing_s/"): v for k, v in means.items() if k.startswith("timing_s/")}
    times.pop("step")
    step_s = means["timing_max_s/step"]
    parts = sorted(times.items(), key=lambda kv: -kv[1])
    lines = [f"{steps} steps, {step_s:.3g} s each; a worker's time: " + ", ".join(f"{k} {v:.3g} s" for k, v in parts)]

    def traffic(name: str) -> str:
        return f"{human_bytes(means[f'data/{name}'])} (most {human_bytes(means[f'data/{name}_max'])})"

    sent, received, local = (traffic(f"bytes_{way}") for way in ("sent", "received", "local"))
    lines.append(f"a worker's bytes per step: sent {sent}, received {received}, passed on locally {local}")
    if "data/imbalance" in means:
        lines.append(f"tokens per worker differ by {means['data/imbalance']:.1%}")
    return "\n".join(lines)
