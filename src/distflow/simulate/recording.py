"""Writes a simulated step as the folder of a run, so that `distflow show` shows it like a real one."""

import json
from collections.abc import Iterator
from pathlib import Path

from distflow.errors import ConfigError
from distflow.observe.recorder import task_kind
from distflow.observe.spans import span_line
from distflow.plan.tasks import Move
from distflow.run_folder import CONFIG, PLAN, SPANS, STATE, rank_file
from distflow.simulate.report import Report
from distflow.simulate.result import TaskTimes

STEP, START_US = 1, 1_000_000  # the clock of a simulation starts somewhere


def record_step(report: Report, folder: Path) -> None:
    """Writes the plan and the spans of every rank."""
    lines: list[list[bytes]] = [[] for _ in range(report.plan.workers)]
    for times in report.result.recorded:
        for rank, line in _lines(report, times):
            lines[rank].append(line)
    end = round(report.result.step_s * 1e6)
    try:
        (folder / SPANS).mkdir(parents=True, exist_ok=True)
        for rank, own in enumerate(lines):
            own.append(span_line(START_US + end, end, STEP, "step", "", {}))
            rank_file(folder, SPANS, rank).write_bytes(b"".join(own))
        (folder / PLAN).write_text(json.dumps(report.plan.to_json(), indent=2) + "\n")
        (folder / CONFIG).write_text(f"# a simulated step on {report.hardware.name}\n")
        (folder / STATE).write_text(json.dumps({"state": "simulated", "steps": STEP, "time": 0}) + "\n")
    except OSError as e:
        raise ConfigError(f"--record {folder}: cannot be written: {e.strerror}") from None


def _lines(report: Report, times: TaskTimes) -> Iterator[tuple[int, bytes]]:
    task = times.task
    kind = task_kind(task, report.plan) if task else "control"
    if kind is None:
        return
    name = "metrics" if task is None else task.id if isinstance(task, Move) else task.name
    for rank, start, end, busy in zip(
        times.ranks.tolist(), times.start.tolist(), times.end.tolist(), times.busy.tolist(), strict=True
    ):
        wait = round(max(0.0, end - start - busy) * 1e6)
        details = {"wait_us": wait} if wait else {}
        yield rank, span_line(START_US + round(end * 1e6), round((end - start) * 1e6), STEP, kind, name, details)
