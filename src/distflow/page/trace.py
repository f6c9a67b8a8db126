"""Exports the spans of a run as a Chrome trace, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator
from typing import IO, Any

from distflow.page.run_folder import RunFolder
from distflow.page.step_view import WorkerSpan, parse_spans
from distflow.run_folder import SPANS, rank_file

TASKS, CALLS, STEPS = 0, 1, 2  # threads: what the worker does, the parts of nodes, the steps
ROUNDING_US = 2  # by which a span may seem to start before the one before it has ended; Perfetto would drop it


def write_trace(run: RunFolder, file: IO[str]) -> int:
    """Writes the trace, worker by worker; returns the number of spans."""
    count = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in _events(run):
        file.write(("," if count else "") + json.dumps(event, separators=(",", ":")) + "\n")
        count += 1
    file.write("]}\n")
    return count


def _events(run: RunFolder) -> Iterator[dict[str, Any]]:
    for rank in run.ranks():
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in ((TASKS, "tasks"), (CALLS, "calls"), (STEPS, "steps")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        ended = {TASKS: 0, STEPS: 0}
        with open(rank_file(run.path, SPANS, rank), "rb") as lines:
            for span in parse_spans(rank, lines):
                thread = {"call": CALLS, "step": STEPS}.get(span.kind, TASKS)
                start = span.start
                if thread in ended:
                    if 0 < ended[thread] - start <= ROUNDING_US:
                        start = min(ended[thread], span.end)
                    ended[thread] = max(ended[thread], span.end)
                yield from _span_events(span, thread, start)


def _span_events(span: WorkerSpan, thread: int, start: int) -> Iterator[dict[str, Any]]:
    args = {"step": span.step, **span.details}
    if span.kind == "error":
        yield {"ph": "i", "s": "p", "name": span.name[:200], "pid": span.rank, "tid": 0, "ts": span.end, "args": args}
        return
    name = f"step {span.step}" if span.kind == "step" else span.name
    event = {
        "ph": "X",
        "name": name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": start,
        "dur": span.end - start,
    }
    yield event | {"args": args}
    if span.kind == "call" and "left" in span.details:
        for us, left in span.details["left"]:
            counter = {"ph": "C", "name": "unfinished responses", "pid": span.rank, "ts": span.start + us}
            yield counter | {"args": {"left": left}}
