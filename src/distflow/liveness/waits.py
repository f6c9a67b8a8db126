"""The table of who waits for whom, printed when a run is stuck."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from distflow.liveness.beacon import Answer
from distflow.liveness.heartbeat import Peer, Record, step_name
from distflow.plan.layout import format_ranks, parse_ranks

MAX_ROWS = 64  # above this, ranks that do the same share a row
MAX_NAMED = 16  # ranks that are described one by one below the table
HEADER = ("host:pid", "step", "task", "for", "waits for ranks", "heartbeat")


def describe_waits(
    workers: int,
    answers: Mapping[int, Answer],
    silent: Mapping[int, Record],
    peers: Sequence[Peer] = (),
    reasons: Mapping[int, str] = MappingProxyType({}),
    suspicion: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """Returns the table, the ranks that did not answer, and the stacks of busy ones that others wait for.

    `silent`: the last record of ranks without a heartbeat; `peers`: where each rank is, if known; `reasons`: what is
    known of ranks that did not answer; `suspicion`: by how many ranks each is not heard, the most suspected come first.
    """
    now = time.monotonic()
    records = {r: a.record for r, a in answers.items()} | dict(silent)
    rows = [_row(r, records.get(r), peers, now) for r in range(workers)]
    lines = _format([("rank", *HEADER), *rows]) if workers <= MAX_ROWS else _grouped(rows)
    mute = [r for r in range(workers) if r not in answers]
    awaited = set(mute)
    for record in records.values():
        if record.waits_for:
            awaited |= set(parse_ranks(record.waits_for, workers, "heartbeat"))
    order = sorted(awaited, key=lambda r: (-suspicion.get(r, 0), r))
    causes = [line for r in order if (line := _describe(r, answers, silent, peers, reasons.get(r, ""), now))]
    if len(causes) > MAX_NAMED:
        causes = [*causes[:MAX_NAMED], f"… and {len(causes) - MAX_NAMED} more ranks"]
    return "\n".join([*lines, *causes])


def _row(rank: int, record: Record | None, peers: Sequence[Peer], now: float) -> tuple[str, ...]:
    if record is None:
        place = f"{peers[rank].host}:{peers[rank].pid}" if peers else "–"
        return (str(rank), place, "–", "no answer", "", "", "")
    return (
        str(rank),
        f"{record.host}:{record.pid}",
        str(record.step),
        record.task,
        f"{max(0.0, now - record.since):.0f} s",
        record.waits_for or "none",
        "has ended" if record.done else f"{now - record.beat:.0f} s ago",
    )


def _describe(
    rank: int,
    answers: Mapping[int, Answer],
    silent: Mapping[int, Record],
    peers: Sequence[Peer],
    reason: str,
    now: float,
) -> str | None:
    """Returns why others wait for this rank, None if it waits itself."""
    if rank not in answers:
        record = silent.get(rank)
        if record is None:
            where = f" on {peers[rank].host}" if peers else ""
            return f"rank {rank}{where} did not answer: {reason or 'it is gone, or the network to its host is cut'}"
        reason = reason or "it was stopped or its machine is gone"
        return (
            f"rank {rank} has had no heartbeat for {now - record.beat:.0f} s: {reason}; it was in"
            f" {step_name(record.step)}, '{record.task}' on {record.host}"
        )
    record, stack = answers[rank].record, answers[rank].stack
    if record.waits_for or record.done:
        return None
    at = f", at:\n{stack.rstrip()}" if stack else ""
    return f"rank {rank} waits for no other rank: it is busy with '{record.task}' of {step_name(record.step)}{at}"


def _grouped(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the table with one row for all ranks in the same step and task that wait for the same ranks."""
    for exact in (True, False):
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, _, step, task, _, waits_for, _ in rows:
            waits_for = waits_for if exact or waits_for in ("none", "") else "others"
            groups.setdefault((step, task, waits_for), []).append(int(rank))
        if len(groups) <= MAX_ROWS:
            break
    fewest = sorted(groups.items(), key=lambda item: len(item[1]))[:MAX_ROWS]
    shown = [(format_ranks(tuple(ranks)), str(len(ranks)), *what) for what, ranks in fewest]
    return _format([("ranks", "how many", "step", "task", "wait for ranks"), *shown])


def _format(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[c if len(c) <= 60 else f"{c[:59]}…" for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
