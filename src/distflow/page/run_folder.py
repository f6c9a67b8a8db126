"""Reads the folder of a run, whatever state it is in: running, killed, of an older version, without samples."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from distflow.config import Config
from distflow.config.differences import changed_from_defaults
from distflow.errors import ConfigError
from distflow.observe.explain import explain
from distflow.observe.findings import findings, findings_over_time
from distflow.observe.spans import step_of
from distflow.page.plan_view import plan_view
from distflow.page.sample_index import SampleIndex
from distflow.page.step_view import MAX_LANES, StepView, parse_spans
from distflow.run_folder import (
    BEST,
    CHECKPOINTS,
    COMPLETE,
    CONFIG,
    METRICS,
    PLAN,
    RUN,
    SAMPLES,
    SPANS,
    STATE,
    VERSIONS,
    rank_file,
)
from distflow.util.lines import Tail, lines_of_steps, log_files, parse
from distflow.util.owner import OwnerView

MAX_POINTS = 2000  # of a curve
ENDED = {"ended": "finished", "simulated": "simulated"}  # in state.json → as it is shown
# A run without a launcher here counts as ended after so long without a step, or after so many of its longest steps.
QUIET_S, QUIET_STEPS = 120.0, 3
HEADLINE = ("val/*/score", "reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm")
HEADLINE_LAST = ("perf/tokens_per_s", "timing_max_s/step")


def is_run(path: Path) -> bool:
    """Returns whether a folder has anything that a run writes."""
    return any((path / name).exists() for name in (METRICS, CONFIG, SPANS))


class RunFolder:
    """All that a page shows of one run. Files that cannot be read are named by `missing`, and never an error."""

    def __init__(self, path: Path) -> None:
        if not is_run(path):
            raise ConfigError(f"{path}: is not the folder of a run; give one, such as runs/grpo (`distflow runs DIR`)")
        self.path, self.name = path, path.resolve().name
        self.samples = SampleIndex(path)
        self._owner = OwnerView(path)
        self._lock = threading.Lock()  # requests are answered by several threads
        self._tail = Tail(path / METRICS)
        self._rows: list[dict[str, Any]] = []
        self._bad = 0

    def rows(self) -> list[dict[str, Any]]:
        """Returns the metrics of all steps so far."""
        with self._lock:
            if self._tail.replaced():
                self._tail, self._rows, self._bad = Tail(self._tail.path), [], 0
            for _, line in self._tail.lines():
                row = parse(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    self._rows.append(row)
                else:
                    self._bad += 1
            return list(self._rows)

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.text(name))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def text(self, name: str) -> str:
        """Returns the text of a file of the folder; empty if it is not there, or a link to somewhere else."""
        path = self.path / name
        try:
            return "" if path.is_symlink() else path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def ranks(self) -> list[int]:
        """Returns the ranks that have recorded spans."""
        return [int(path.stem) for path in log_files(self.path / SPANS)]

    def signature(self) -> str:
        """Returns a text that changes whenever the run has written something."""
        files = [self.path / METRICS, *log_files(self.path / SAMPLES)]
        files += [rank_file(self.path, SPANS, r) for r in self.ranks()[:1]]
        states = []
        for file in files:
            try:
                state = file.stat()
            except OSError:
                continue
            states.append(f"{state.st_size}.{state.st_mtime_ns}")
        return "-".join([*states, self.state()["state"]])

    def state(self) -> dict[str, Any]:
        """Returns whether the run is running, how far it is, and when it was last heard of."""
        rows, state = self.rows(), self.read_json(STATE)
        step = max((row["step"] for row in rows), default=None)
        steps, error = state.get("steps"), self._error()
        last = max((float(row.get("time") or 0) for row in rows), default=state.get("time", 0.0))
        if error:
            word = "stopped" if "stopped on request" in error else "failed"
        elif state.get("state") in ENDED:
            word = ENDED[state["state"]]
        elif self._is_alive(rows, last):
            word = "running"
        else:  # no final state recorded
            word = "killed" if state else "ended"
        return {"state": word, "step": step, "steps": steps, "last": last, "error": error}

    def _is_alive(self, rows: Sequence[Mapping[str, Any]], last: float) -> bool:
        alive = self._owner.is_alive()
        if alive is None:  # on another host, until its record was seen to be renewed
            alive = time.time() - last < max(QUIET_S, QUIET_STEPS * _longest_step(rows))
        return alive

    def _error(self) -> str:
        """Returns the error that ended the run, if a worker reported one and nothing followed it."""
        latest: tuple[int, str] = (0, "")
        for rank in self.ranks()[:MAX_LANES]:
            line = _last_line(rank_file(self.path, SPANS, rank))
            for span in parse_spans(rank, [line]):
                latest = max(latest, (span.end, span.name if span.kind == "error" else ""))
        return latest[1]

    def overview(self) -> dict[str, Any]:
        rows = self.rows()
        return {
            "name": self.name,
            "path": str(self.path),
            **self.state(),
            "config": self.text(CONFIG),
            "changed": self.changed_keys(),
            "versions": self.read_json(VERSIONS),
            "run": self.read_json(RUN),
            "workers": len(self.ranks()),
            "headline": _headline(rows),
            "warnings": [{"text": f.text, "metric": f.metric} for f in findings(rows)],
            "warned": findings_over_time(rows),
            "checkpoints": self.checkpoints(),
            "missing": self.missing(),
            "steps_recorded": self.steps(),
            "signature": self.signature(),
        }

    def config(self) -> dict[str, Any]:
        """Returns the config as the run has written it; empty if it cannot be read."""
        try:
            value = yaml.safe_load(self.text(CONFIG))
        except yaml.YAMLError:
            return {}
        return value if isinstance(value, dict) else {}

    def changed_keys(self) -> list[str] | None:
        """Returns the keys of the config that are not at their defaults; None if this version does not know them."""
        try:
            return list(changed_from_defaults(Config.model_validate(self.config())))
        except ValueError:
            return None

    def checkpoints(self) -> list[dict[str, Any]]:
        """Returns the complete checkpoints, oldest first: step, when it was written, whether it is the best one."""
        folder = self.path / CHECKPOINTS
        best = self.text(f"{CHECKPOINTS}/{BEST}").strip()
        found = []
        for done in folder.glob(f"step_*/{COMPLETE}"):
            step = done.parent.name[5:]
            if step.isdecimal():
                found.append({"step": int(step), "time": done.stat().st_mtime, "best": step == best})
        return sorted(found, key=lambda c: c["step"])

    def missing(self) -> list[str]:
        """Describes what is missing in the folder."""
        said = []
        if self.state()["state"] == "simulated":
            return ["A simulated step: it has no metrics and no samples."]
        if not self.rows():
            said.append("No metrics yet: the first step has not ended.")
        if not self.ranks():
            said.append("No spans: recorded by an older version, or with `record.spans: false`.")
        if not self.samples.recorded():
            said.append("No samples: recorded by an older version, with `record.samples: 0`, or by a flow without any.")
        if not self.read_json(PLAN):
            said.append("No plan: the run is of an older version.")
        bad = self._bad + self.samples.bad
        if bad:
            said.append(f"{bad} lines could not be read and are left out.")
        return said

    def metrics(self) -> dict[str, Any]:
        """Returns the curves: columns over steps, at most MAX_POINTS of them."""
        rows = self.rows()
        every = -(-len(rows) // MAX_POINTS) or 1
        rows = rows[::-every][::-1]
        names = sorted({name for row in rows for name in row} - {"step", "time"})
        return {
            "step": [row["step"] for row in rows],
            "time": [row.get("time") for row in rows],
            "series": {name: [_short(row.get(name)) for row in rows] for name in names},
            "explain": {name: text for name in names if (text := explain(name))},
        }

    def plan(self) -> dict[str, Any]:
        plan = self.read_json(PLAN)
        try:
            return plan_view(plan) if plan else {}
        except (KeyError, TypeError, ValueError, IndexError):
            return {}  # of a version that wrote it otherwise

    def steps(self) -> list[int]:
        """Returns the steps whose spans are recorded, those of the first rank."""
        ranks = self.ranks()
        if not ranks:
            return []
        path = rank_file(self.path, SPANS, ranks[0])
        found: dict[int, None] = {}
        try:
            with open(path, "rb") as file:
                for line in file:
                    if b',"step","' in line and (step := step_of(line)) is not None:
                        found[step] = None
        except OSError:
            return []
        return sorted(found)

    def step(self, step: int, ranks: Sequence[int] | None = None) -> StepView:
        """Returns the view of one step."""
        found = []
        for rank in self.ranks() if ranks is None else ranks:
            path = rank_file(self.path, SPANS, rank)
            found += parse_spans(rank, lines_of_steps(path, step, step, step_of))
        return StepView(step, found)


def _headline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the few metrics that matter."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    patterns = [*HEADLINE, *HEADLINE_LAST]
    return [next(n for n in names if fnmatchcase(n, p)) for p in patterns if any(fnmatchcase(n, p) for n in names)]


def _longest_step(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds of the longest step."""
    return max((row.get("timing_max_s/step") or 0.0 for row in rows), default=0.0)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _last_line(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return b""
    return next((line for line in reversed(lines) if line.endswith(b"\n")), b"")
