"""Exports the spans of a run as a Chrome trace, which Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator
from typing import IO, Any

from distflow.observe.names import SPANS
from distflow.observe.page.run_folder import RunFolder
from distflow.observe.page.step_view import Span, parse_spans

CALLS = 1  # thread of the parts of nodes, below the worker's own


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
        with open(run.path / SPANS / f"{rank}.jsonl", "rb") as lines:
            for span in parse_spans(rank, lines):
                yield from _span_events(span)


def _span_events(span: Span) -> Iterator[dict[str, Any]]:
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
        "ts": span.start,
        "dur": span.end - span.start,
    }
    yield event | {"tid": CALLS if span.kind == "call" else 0, "args": args}
    if span.kind == "call" and "left" in span.details:
        for us, left in span.details["left"]:
            counter = {"ph": "C", "name": "unfinished responses", "pid": span.rank, "ts": span.start + us}
            yield counter | {"args": {"left": left}}
