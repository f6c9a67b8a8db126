"""Does the steps one after the other, each in processes of its own, and writes a report. Imports no torch."""

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distflow.errors import ConfigError, suggest
from distflow.first_hour.processes import Clock, StepError, TooLongError, ask
from distflow.first_hour.steps import SHORT_S, STEPS, Setting, Step
from distflow.util.files import write_atomically
from distflow.util.version import __version__

REPORT = "report.json"
_DISK = 0.5  # of what is free that models may take


@dataclass
class Result:
    """The outcome of a step."""

    step: str
    what: str
    status: str = "skipped"  # ok, failed, too long
    seconds: float = 0.0
    reason: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The results of a first hour."""

    facts: dict[str, Any]
    results: list[Result]
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def well(self) -> bool:
        return all(r.status in ("ok", "skipped") for r in self.results)

    def to_json(self) -> dict[str, Any]:
        system = f"{platform.system()} {platform.release()}"
        head = {"distflow": __version__, "made": self.made, "system": system, "facts": self.facts}
        return head | {"steps": [asdict(r) for r in self.results]}


def check(
    folder: Path,
    quick: bool = False,
    only: Sequence[str] = (),
    workers: int | None = None,
    limit_s: float | None = None,
    on_result: Callable[[Result], object] = lambda result: None,
    steps: Sequence[Step] = STEPS,
) -> Report:
    """Does the steps, or only the ones that `only` names, in a folder. One that fails or takes too long stops no other.

    `quick`: with tiny models on any device; `limit_s`: of each step, instead of its own.
    """
    chosen = choose_steps(only, steps)
    folder = folder.absolute()
    for name in ("runs", "models", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    report = Report({}, [])
    begun, result = time.monotonic(), Result("device", "what is here")
    given = {"workers": workers, "quick": quick, "free": int(_DISK * shutil.disk_usage(folder).free)}
    try:
        report.facts = ask("facts", given, folder / "logs" / "device.log", Clock(limit_s or SHORT_S))
        result.status = "ok"
    except StepError as e:
        result.status, result.reason = _failure(e)
    _note(report, result, begun, folder, on_result)
    for step in chosen:
        why_not = step.why_not(report.facts) if report.facts else "what is here is not known"
        begun, result = time.monotonic(), Result(step.name, step.what, reason=why_not)
        if not result.reason:
            clock = Clock(limit_s or step.limit_s)
            setting = Setting(folder, report.facts, quick, clock, step.name)
            try:
                result.numbers, result.status = step.do(setting), "ok"
            except Exception as e:  # whatever it is, the others are done
                result.status, result.reason = _failure(e)
        _note(report, result, begun, folder, on_result)
    shutil.rmtree(folder / "models", ignore_errors=True)
    return report


def choose_steps(only: Sequence[str], steps: Sequence[Step] = STEPS) -> list[Step]:
    names = [s.name for s in steps]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only: there is no step '{name}'{suggest(name, names)}; there are {'; '.join(names)}")
    return [s for s in steps if not only or s.name in only]


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, StepError):
        return "too long" if isinstance(error, TooLongError) else "failed", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def _note(report: Report, result: Result, begun: float, folder: Path, on_result: Callable[[Result], object]) -> None:
    """Adds a result, and writes the report as far as it is there: the machine may hang in the next step."""
    result.seconds = round(time.monotonic() - begun, 1)
    report.results.append(result)
    write_atomically(folder / REPORT, json.dumps(report.to_json(), indent=1))
    on_result(result)


def values(numbers: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """Returns what was predicted of a number, or is allowed, and what was measured; None for what is not known."""
    of = numbers.get(key) or {}
    return of.get("predicted", of.get("limit")), of.get("measured")
