"""A step as all workers recorded it."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.observe.spans import span_line, step_of
from distflow.page.step_view import MAX_LANES, StepView, WorkerSpan, parse_spans
from distflow.util.lines import lines_of_steps


def task(rank: int, start: int, end: int, kind: str, name: str, wait: int = 0, **details: object) -> WorkerSpan:
    return WorkerSpan(rank, start, end, 1, kind, name, {**({"wait_us": wait} if wait else {}), **details})


# Rank 0 generates while rank 1 waits; then rank 1 trains while rank 0 waits.
STEP = StepView(
    1,
    [
        task(0, 0, 60, "inference", "generate"),
        task(0, 60, 70, "move", "m1", sent=100, to={"1": 100}),
        task(1, 0, 70, "move", "m1", wait=62),
        task(1, 70, 170, "train", "update", tokens=5),
        task(0, 70, 180, "control", "metrics", wait=105),
        task(1, 170, 180, "control", "metrics"),
    ],
)


def test_the_critical_path_goes_over_whoever_was_waited_for() -> None:
    path = [(s.rank, s.name, start, end) for s, start, end in STEP.critical_path()]
    assert path == [(0, "generate", 0, 60), (0, "m1", 60, 70), (1, "update", 70, 170), (1, "metrics", 170, 180)]


def test_a_worker_that_is_idle_before_a_task_is_not_on_the_critical_path() -> None:
    # As simulated steps are recorded: rank 1 has no span while it has nothing to do.
    view = StepView(
        1,
        [
            task(0, 0, 10, "weights", "actor_weights"),
            task(1, 0, 10, "weights", "actor_weights"),
            task(0, 10, 60, "inference", "generate"),
            task(0, 60, 60, "inference", "score"),
            task(0, 60, 60, "compute", "advantage"),
            task(0, 60, 70, "move", "m1"),
            task(1, 60, 70, "move", "m1"),
            task(1, 70, 170, "train", "update"),
        ],
    )
    path = {s.name: end - start for s, start, end in view.critical_path()}
    assert path == {"actor_weights": 10, "generate": 50, "score": 0, "advantage": 0, "m1": 10, "update": 100}


def test_idle_is_what_a_worker_did_not_work() -> None:
    assert STEP.idle() == pytest.approx({0: 1 - 75 / 180, 1: 1 - 118 / 180})


def test_the_critical_path_covers_the_step_without_gaps_if_workers_have_none() -> None:
    path = STEP.critical_path()
    assert path[0][1] == STEP.start
    assert path[-1][2] == STEP.end
    assert all(a[2] == b[1] for a, b in pairwise(path))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(1, 50), st.sampled_from(["move", "train"])),
        min_size=1,
        max_size=40,
    )
)
def test_any_spans_have_a_critical_path_that_goes_forward(rows: list[tuple[int, int, int, str]]) -> None:
    spans = [task(rank, start, start + n, kind, kind, wait=n // 2) for rank, start, n, kind in rows]
    path = StepView(1, spans).critical_path()
    assert path
    assert all(a[2] <= b[1] or a[1] <= b[1] for a, b in pairwise(path))


def test_who_sent_what_to_whom() -> None:
    traffic = STEP.traffic()
    assert traffic["matrix"] == [[0, 100], [0, 0]]
    assert traffic["sent_by_kind"]["move"] == 100
    assert traffic["peers_known"]
    assert traffic["tokens"] == {"update": [0, 5]}


def test_many_workers_are_a_heat_map_and_a_matrix_of_blocks() -> None:
    workers = 1000
    spans = [task(r, 0, 100, "train", "update", wait=50 * (r % 2)) for r in range(workers)]
    spans += [task(r, 100, 110, "move", "m", sent=8, to={str((r + 500) % workers): 8}) for r in range(workers)]
    view = StepView(1, spans)
    fleet = view.fleet()
    assert len(fleet["cells"]) == workers
    assert fleet["cells"][0][10] == 0
    assert fleet["cells"][1][80] == 100  # the wait is at the end
    assert fleet["idle"][1] > fleet["idle"][0]
    traffic = view.traffic()
    assert len(traffic["matrix"]) <= MAX_LANES
    assert sum(map(sum, traffic["matrix"])) == 8 * workers


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(0, 70))
def test_the_lines_of_a_step_are_found_by_bisection(counts: list[int], wanted: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.jsonl"
        lines = [
            span_line(1000 * step + k, 1, step, "train", "a node with a long name " * 8, {})
            for step, count in enumerate(counts)
            for k in range(count)
        ]
        path.write_bytes(b"".join(lines) + b"[12")
        spans = parse_spans(0, lines_of_steps(path, wanted, wanted, step_of))
        assert [s.end for s in spans] == [
            1000 * wanted + k for k in range(counts[wanted] if wanted < len(counts) else 0)
        ]
