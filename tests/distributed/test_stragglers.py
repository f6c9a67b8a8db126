"""The worker that the others wait for is in the metrics of every step, and in one line at the end of a run."""

import json
import re
from pathlib import Path

from distflow.observe.metrics import BUSIEST, StepMetrics
from distflow.observe.stragglers import Stragglers
from distributed.test_restart import write_config
from warm_launch import Launch


def test_a_worker_that_is_slow_in_a_node_is_named(tmp_path: Path) -> None:
    launch = Launch(write_config(tmp_path, {"slow": 2, "nap_s": 0.2}, workers=4, placement={}))
    assert launch.wait() == 0, launch.err
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["perf/slowest_rank"] for m in steps] == [2] * 4
    assert all(1 < m["perf/straggle"] <= 4 for m in steps), steps  # times the mean of four
    assert all(BUSIEST not in m for m in steps)
    assert re.search(
        r"^rank 2 \(\S+\) was the slowest in 4 of 4 steps, \d\.\d times the mean; mostly in 'work'$", launch.out, re.M
    ), launch.out


def reduced(*seconds: float) -> dict[str, float]:
    """Returns the reduced metrics of workers that spend this long in a node."""
    all_metrics = [StepMetrics() for _ in seconds]
    for rank, (metrics, s) in enumerate(zip(all_metrics, seconds, strict=True)):
        metrics.work(rank, s)
    mean = sum(seconds) / len(seconds)
    busiest = max(m.totals[BUSIEST, "max"][0] for m in all_metrics)
    return {"perf/work_s": mean, BUSIEST: busiest, "timing_s/node": mean, "timing_max_s/node": max(seconds)}


def test_only_a_rank_that_is_clearly_and_mostly_the_slowest_is_reported() -> None:
    for steps, line in (
        ([(1.0, 1.1), (1.0, 1.1)], None),
        ([(1.0, 3.0), (3.0, 1.0)], None),
        ([(1.0, 3.0), (3.0, 1.0), (1.0, 3.0)], "rank 1 was the slowest in 2 of 3 steps, 1.5 times the mean"),
        ([(0.0, 0.0)], None),
        ([], None),
    ):
        stragglers = Stragglers()
        for i, seconds in enumerate(steps, 1):
            stragglers.update(i, reduced(*seconds))
        assert stragglers.summary() == (line and f"{line}; mostly in 'node'")


def test_the_rank_comes_through_the_reduction_whatever_the_time() -> None:
    for seconds in (0.0001, 1.2345, 400_000.0):
        for slowest in (0, 999):
            metrics = reduced(*(2 * seconds if r == slowest else seconds for r in range(1000)))
            Stragglers().update(0, metrics)
            assert metrics["perf/slowest_rank"] == slowest
            assert abs(metrics["perf/straggle"] - 2) < 0.01
