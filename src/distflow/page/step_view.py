"""One step as all workers recorded it: tasks, waits, traffic and the critical path."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LANES = 64  # above this many workers a step is shown as a heat map
BINS = 120  # of the heat map, over the time of a step
COMMUNICATES = ("move", "weights", "control", "resample", "checkpoint")


@dataclass(frozen=True)
class WorkerSpan:
    """Times in microseconds; see distflow.observe.spans."""

    rank: int
    start: int
    end: int
    step: int
    kind: str
    name: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wait(self) -> int:
        return min(int(self.details.get("wait_us", 0)), self.end - self.start)

    @property
    def held_out(self) -> bool:
        return "split" in self.details

    @property
    def is_task(self) -> bool:
        return self.kind not in ("call", "step", "error")


def parse_spans(rank: int, lines: Iterable[bytes]) -> list[WorkerSpan]:
    """Returns the spans of one worker; lines of a format that is not known are left out."""
    spans = []
    for line in lines:
        try:
            end, duration, step, kind, name, *rest = json.loads(line)
            details = rest[0] if rest and isinstance(rest[0], dict) else {}
            spans.append(WorkerSpan(rank, int(end) - int(duration), int(end), int(step), str(kind), str(name), details))
        except (ValueError, TypeError):
            continue
    return spans


class StepView:
    """The spans of all workers in one step."""

    def __init__(self, step: int, spans: Sequence[WorkerSpan]) -> None:
        self.step, self.spans = step, spans
        self.tasks = [s for s in spans if s.is_task]
        self.by_rank: dict[int, list[WorkerSpan]] = defaultdict(list)
        for span in self.tasks:
            self.by_rank[span.rank].append(span)
        self.start = min((s.start for s in self.tasks), default=0)
        self.end = max((s.end for s in self.tasks), default=0)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    def idle(self) -> dict[int, float]:
        """Returns the share of the step that each worker did not work: it waited, or had nothing to do."""
        length = max(1, self.end - self.start)
        return {
            rank: max(0.0, 1 - sum(s.end - s.start - s.wait for s in self.by_rank[rank]) / length)
            for rank in self.ranks
        }

    def lanes(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns the data of a timeline: spans as short lists, names and kinds as numbers."""
        shown = set(ranks if ranks is not None else self.ranks[:MAX_LANES])
        names: dict[str, int] = {}
        kinds: dict[str, int] = {}
        rows = []
        for s in self.spans:
            if s.rank in shown and s.kind != "error":
                name, kind = names.setdefault(s.name, len(names)), kinds.setdefault(s.kind, len(kinds))
                row = [s.rank, s.start - self.start, s.end - s.start, name, kind, s.wait]
                rows.append([*row, _shown_details(s)] if s.details else row)
        return {
            "step": self.step,
            "base": self.start,
            "length": self.end - self.start,
            "ranks": sorted(shown & set(self.ranks)),
            "workers": len(self.ranks),
            "names": list(names),
            "kinds": list(kinds),
            "spans": rows,
            "idle": {rank: round(idle, 4) for rank, idle in self.idle().items() if rank in shown},
        }

    def fleet(self) -> dict[str, Any]:
        """Returns the heat map of many workers: for each, how idle it is over the time of the step, in percent."""
        length = max(1, self.end - self.start)
        rows, kinds = [], sorted({s.kind for s in self.tasks})
        for rank in self.ranks:
            busy = [0.0] * BINS
            for s in self.by_rank[rank]:
                _add(busy, (s.start - self.start) / length * BINS, (s.end - s.wait - self.start) / length * BINS)
            rows.append([round(100 * (1 - min(1.0, b))) for b in busy])
        idle = self.idle()
        return {
            "step": self.step,
            "length": length,
            "ranks": self.ranks,
            "cells": rows,
            "kinds": kinds,
            "idle": [round(idle[r], 4) for r in self.ranks],
        }

    def nodes(self) -> list[dict[str, Any]]:
        """Returns the tasks of the step by name: mean and maximum time, wait, bytes sent, samples and tokens."""
        groups: dict[tuple[str, str, bool], list[WorkerSpan]] = defaultdict(list)
        for s in self.tasks:
            groups[s.name, s.kind, s.held_out].append(s)
        on_path: dict[tuple[str, str, bool], int] = defaultdict(int)
        for s, start, end in self.critical_path():
            on_path[s.name, s.kind, s.held_out] += end - start
        rows = []
        for (name, kind, held_out), spans in groups.items():
            slowest = max(spans, key=lambda s: s.end - s.start - s.wait)
            work = [s.end - s.start - s.wait for s in spans]
            rows.append(
                {
                    "name": name,
                    "kind": kind,
                    "held_out": held_out,
                    "ranks": len({s.rank for s in spans}),
                    "mean_us": sum(s.end - s.start for s in spans) // len(spans),
                    "work_us": sum(work) // len(work),
                    "max_us": max(work),
                    "slowest": slowest.rank,
                    "wait_us": sum(s.wait for s in spans) // len(spans),
                    "sent": sum(s.details.get("sent", 0) for s in spans),
                    "critical_us": on_path[name, kind, held_out],
                }
            )
        return rows

    def critical_path(self) -> list[tuple[WorkerSpan, int, int]]:
        """Returns the critical path of the step: spans, and when each was on it.

        Goes backwards from the span that ended last. A task that waited for others goes on with the one that came to it
        last; any other with what its worker did before.
        """
        if not self.tasks:
            return []
        before = self._before()
        # A worker comes to a task when it has done what is before it: a simulated one is idle then, without a span.
        came = {id(s): p.end if (p := before[id(s)]) else self.start for s in self.tasks}
        last_to_come: dict[tuple[str, str, bool], WorkerSpan] = {}
        for s in self.tasks:
            key = s.name, s.kind, s.held_out
            if key not in last_to_come or (came[id(s)], s.start) > (came[id(late := last_to_come[key])], late.start):
                last_to_come[key] = s
        path: list[tuple[WorkerSpan, int, int]] = []
        span: WorkerSpan | None = max(self.tasks, key=lambda s: s.end)
        end = self.end
        while span is not None and len(path) < 10_000:
            late = last_to_come[span.name, span.kind, span.held_out]
            waited = span.wait or came[id(span)] < span.start
            if span.kind in COMMUNICATES and waited and came[id(span)] < came[id(late)] and late.start < end:
                span = late
            path.append((span, span.start, end))
            end = span.start
            span = before[id(span)]
        return path[::-1]

    def _before(self) -> dict[int, WorkerSpan | None]:
        """Returns the task before each task on its worker, by the id of the object."""
        before: dict[int, WorkerSpan | None] = {}
        for spans in self.by_rank.values():
            ordered = sorted(spans, key=lambda s: (s.end, s.start))
            for i, span in enumerate(ordered):
                before[id(span)] = next(
                    (p for p in map(ordered.__getitem__, range(i - 1, -1, -1)) if p.end <= span.start), None
                )
        return before

    def traffic(self) -> dict[str, Any]:
        """Returns who sent how much to whom, in at most 64 × 64 cells of neighbouring ranks, and tokens by rank."""
        workers = max([*self.ranks, 0]) + 1
        size = -(-workers // MAX_LANES)
        replicas = -(-workers // size)
        matrix = [[0] * replicas for _ in range(replicas)]
        kinds: dict[str, int] = defaultdict(int)
        known = True
        for s in self.tasks:
            sent = int(s.details.get("sent", 0))
            kinds[s.kind] += sent
            known &= "to" in s.details or not sent
            for peer, count in s.details.get("to", {}).items():
                if int(peer) < workers:
                    matrix[s.rank // size][int(peer) // size] += int(count)
        tokens: dict[str, dict[int, int]] = defaultdict(dict)
        for s in self.tasks:
            if "tokens" in s.details and not s.held_out:
                tokens[s.name][s.rank] = int(s.details["tokens"])
        local = {s.rank: int(s.details["local"]) for s in self.spans if s.kind == "step" and "local" in s.details}
        return {
            "step": self.step,
            "workers": workers,
            "ranks_per_replica": size,
            "matrix": matrix,
            "sent_by_kind": dict(kinds),
            "peers_known": known,
            "local": sum(local.values()),
            "tokens": {name: [by_rank.get(r, 0) for r in range(workers)] for name, by_rank in tokens.items()},
        }


def _shown_details(span: WorkerSpan) -> dict[str, Any]:
    return {k: v for k, v in span.details.items() if k not in ("to", "wait_us")}


def _add(bins: list[float], start: float, end: float) -> None:
    """Adds the time from `start` to `end`, in bins, to the bins that it falls into."""
    first, last = max(0, int(start)), min(len(bins) - 1, int(end))
    for i in range(first, last + 1):
        bins[i] += max(0.0, min(end, i + 1) - max(start, i))
