"""What a worker records of its tasks."""

import json
from collections import Counter
from pathlib import Path

from distflow.observe.spans import MAX_CALLS, MAX_PEERS, SpanRecorder, step_of


def recorder(folder: Path, rank: int = 0) -> SpanRecorder:
    spans = SpanRecorder(folder, rank, Counter())
    spans.open(1000.0, 0)
    return spans


def lines(folder: Path, rank: int = 0) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "spans" / f"{rank}.jsonl").read_text().splitlines()]


def test_spans_end_in_order_by_the_clock_that_all_agreed_on(tmp_path: Path) -> None:
    spans = recorder(tmp_path)
    with spans.task(0, "load", "load"):
        pass
    with spans.task(0, "train", "actor.update") as details:
        details["samples"] = 4
    spans.end_step(0, local=7)
    rows = lines(tmp_path)
    assert [row[2:] for row in rows] == [
        [0, "load", "load"],
        [0, "train", "actor.update", {"samples": 4}],
        [0, "step", "", {"local": 7}],
    ]
    ends = [row[0] for row in rows]
    assert ends == sorted(ends)  # type: ignore[type-var]
    assert all(1000_000_000 <= end < 1060_000_000 for end in ends)  # type: ignore[operator]


def test_a_span_has_its_own_waits_and_bytes_per_peer(tmp_path: Path) -> None:
    spans = recorder(tmp_path)
    with spans.task(0, "move", "m1"):
        spans.waited((1, 2), 0.25)
        spans.waited((3,), 0.5)
        spans.sent.update({1: 100, 2: 50})
    with spans.task(0, "move", "m2"):
        pass
    spans.end_step(0)
    first, second, _ = lines(tmp_path)
    assert first[5] == {"wait_us": 750_000, "waits_for": "3", "sent": 150, "to": {"1": 100, "2": 50}}
    assert len(second) == 5


def test_what_a_thread_has_sent_for_a_task_is_a_span_without_a_duration(tmp_path: Path) -> None:
    spans, sent = recorder(tmp_path), Counter({1: 100, 2: 50})
    spans.sent_by_thread(3, "move", "m1", sent)
    spans.sent_by_thread(3, "move", "m2", sent)
    spans.end_step(3)
    (_, *row), _ = lines(tmp_path)
    assert row == [0, 3, "move", "m1", {"sent": 150, "to": {"1": 100, "2": 50}}]


def test_who_many_peers_are_is_only_said_in_some_steps(tmp_path: Path) -> None:
    spans = recorder(tmp_path)
    for step in range(17):
        with spans.task(step, "move", "m1"):
            spans.sent.update(dict.fromkeys(range(MAX_PEERS + 1), 1))
    spans.flush()
    assert [row[2] for row in lines(tmp_path) if "to" in row[5]] == [0, 16]  # type: ignore[operator]
    assert all(row[5]["sent"] == MAX_PEERS + 1 for row in lines(tmp_path))  # type: ignore[index]


def test_the_calls_of_a_task_are_bounded(tmp_path: Path) -> None:
    spans = recorder(tmp_path)
    for _ in range(2):
        with spans.task(0, "inference", "rollout"):
            for _ in range(1000):
                with spans.call(0, "environment"):
                    pass
    spans.flush()
    assert len(lines(tmp_path)) == 2 * (MAX_CALLS + 1)


def test_the_step_of_a_line_is_read_without_parsing_it_and_only_if_it_is_whole(tmp_path: Path) -> None:
    spans = recorder(tmp_path)
    spans.end_step(-1)
    spans.end_step(12, local=3)
    whole = (tmp_path / "spans" / "0.jsonl").read_bytes().splitlines(keepends=True)
    assert [step_of(line) for line in whole] == [-1, 12]
    assert [step_of(whole[1][:n]) for n in range(len(whole[1]))] == [None] * len(whole[1])


def test_a_failure_is_recorded(tmp_path: Path) -> None:
    spans = recorder(tmp_path, rank=3)
    spans.fail(5, "reward.py: division by zero")
    assert lines(tmp_path, 3)[0][2:] == [5, "error", "reward.py: division by zero"]
