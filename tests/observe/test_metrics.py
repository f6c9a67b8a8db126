"""Metrics of a step over all workers: a mean is that of all samples, and a least value is the least of any worker."""

import pytest

from distflow.comm.collectives import Communication
from distflow.errors import DistflowError
from distflow.observe.metrics import MetricsReducer, StepMetrics
from simulate import simulate


def reduced(*workers: StepMetrics) -> dict[str, float]:
    """Returns the metrics as rank 0 logs them."""
    rows: list[dict[str, float]] = []
    ranks = range(len(workers))
    reducers = [MetricsReducer(r, ranks, (lambda _, row: rows.append(row)) if r == 0 else None) for r in ranks]

    def run(rank: int) -> Communication[None]:
        yield from reducers[rank].reduce(1, workers[rank])

    simulate({r: run(r) for r in ranks})
    for reducer in reducers:
        reducer.wait()
        reducer.close()
    (row,) = rows
    return row


def worker(reduce: str, *values: tuple[float, float]) -> StepMetrics:
    metrics = StepMetrics()
    for value, count in values:
        metrics.log("x", value, count, reduce)  # type: ignore[arg-type]
    return metrics


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", (3 * 1 + -7 * 3 + 5 * 4) / 8), ("sum", 1.0), ("max", 5.0), ("min", -7.0)],
)
def test_values_of_all_workers_are_one(reduce: str, expected: float) -> None:
    workers = [worker(reduce, (3, 1), (-7, 3)), worker(reduce), worker(reduce, (5, 4))]  # the second has no samples
    assert reduced(*workers) == {"x": expected}


@pytest.mark.parametrize(("reduce", "expected"), [("min", 2.0), ("max", 9.0)])
def test_the_least_and_the_largest_value_need_no_value_of_the_other_sign(reduce: str, expected: float) -> None:
    assert reduced(worker(reduce, (9, 1)), worker(reduce, (2, 1), (4, 1))) == {"x": expected}


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min"])
def test_metrics_that_are_merged_are_those_of_one_log(reduce: str) -> None:
    parts = [worker(reduce, (3, 1), (-7, 3)), worker(reduce, (5, 4))]
    whole = worker(reduce, (3, 1), (-7, 3), (5, 4))
    merged = StepMetrics()
    for part in parts:
        merged.merge(part.totals)
    assert merged.totals == whole.totals


def test_of_a_replica_only_one_worker_counts_sums() -> None:
    leader, follower = StepMetrics(), StepMetrics()
    for metrics in (leader, follower.without_sums()):
        metrics.log("seconds", 4.0)
        metrics.log("samples", 6, reduce="sum")
    assert reduced(leader, follower) == {"samples": 6.0, "seconds": 4.0}


def test_the_slowest_worker_is_known_by_its_rank() -> None:
    workers = [StepMetrics() for _ in range(3)]
    for rank, seconds in enumerate((0.5, 2.25, 1.0)):
        workers[rank].work(rank, seconds)
    row = reduced(*workers)
    assert row["perf/work_s"] == pytest.approx(1.25)
    assert divmod(int(row["perf/busiest"]), 1 << 20) == (22_500, 1)
    for rank, worker_of in enumerate(others := [StepMetrics() for _ in range(2)]):
        worker_of.work(rank, 1.0, ranks_alike=False)
    assert reduced(*others) == {"perf/work_s": 1.0}  # whose is the most work says nothing


def test_one_name_is_reduced_in_one_way() -> None:
    with pytest.raises(DistflowError, match="metric 'x' is reduced in two ways"):
        reduced(worker("sum", (1, 1)), worker("mean", (1, 1)))
