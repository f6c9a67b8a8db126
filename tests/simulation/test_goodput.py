"""Goodput under failures: the formula against failures that are drawn, and the best interval against all others."""

import math
from pathlib import Path

import numpy as np
import pytest

from distflow.errors import ConfigError
from distflow.simulate.failures import DAY, Failures, best_interval, daly, goodput, survive, young

MANY = Failures(lost_per_day=20.0, restart_s=300.0, save_s=20.0, write_s=60.0)


def drawn(step_s: float, every: int, hosts: int, given: Failures, days: float) -> float:
    """Walks a long run, failure by failure, and returns the share of the time that was useful."""
    rng, mean = np.random.default_rng(0), given.mean_time_s(hosts)
    now = kept = 0.0
    since, complete_at = 0.0, -1.0  # useful seconds of the checkpoint that is being written, and when it is complete
    fails = rng.exponential(mean)
    while now < days * DAY:
        end = now + every * step_s + given.save_s
        if fails < end:
            if fails < complete_at:
                kept -= since  # the newest checkpoint was not complete
            now, since, complete_at = fails + given.restart_s, 0.0, -1.0
            fails = now + rng.exponential(mean)
            continue
        now, since = end, every * step_s
        kept += since
        complete_at = end + given.write_s
    return kept / now


@pytest.mark.parametrize(("every", "hosts"), [(5, 125), (20, 125), (20, 1000), (60, 1000)])
def test_the_formula_is_what_drawn_failures_give(every: int, hosts: int) -> None:
    assert goodput(60.0, every, hosts, MANY) == pytest.approx(drawn(60.0, every, hosts, MANY, 3000), rel=0.02)


@pytest.mark.parametrize("hosts", [1, 128, 1250, 8000])
def test_no_other_interval_is_better(hosts: int) -> None:
    best = best_interval(60.0, hosts, MANY)
    assert all(
        goodput(60.0, k, hosts, MANY) <= goodput(60.0, best, hosts, MANY)
        for k in {1, best // 2, best - 1, best + 1} - {0}
    )


def test_where_saving_is_short_young_and_daly_are_right() -> None:
    given = Failures(lost_per_day=4.0, restart_s=0.0, save_s=10.0, write_s=0.0)
    mean = given.mean_time_s(1000)
    assert mean == pytest.approx(DAY / 4)
    assert young(10.0, mean) == pytest.approx(math.sqrt(20 * mean))
    assert best_interval(1.0, 1000, given) == pytest.approx(daly(10.0, mean), rel=0.01)
    assert daly(10.0, mean) < young(10.0, mean)


def test_more_workers_lose_more_and_save_more_often() -> None:
    few, many = (survive(60.0, 50, n, 8, MANY) for n in (1024, 10_000))
    assert (few.hosts, many.hosts) == (128, 1250)
    assert many.best < few.best
    assert many.best_every < few.best_every
    assert few.goodput <= few.best


def test_the_table_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    for workers, save in ((1024, 1.0), (10_000, 1.0), (1024, 30.0), (10_000, 30.0)):
        g = survive(100.0, 50, workers, 8, Failures(save_s=save))
        row = f"| {workers:,} | {save:g} s | {100 * g.goodput:.1f} % | every {g.best_every} | {100 * g.best:.1f} % |"
        assert f"{row} {g.young_s:,.0f} s | {g.daly_s:,.0f} s |" in page


def test_without_failures_only_saving_costs() -> None:
    calm = Failures(lost_per_day=0.0, save_s=1.0)
    assert goodput(10.0, 1, 100, calm) == pytest.approx(10 / 11)
    assert survive(10.0, 0, 8, 8, calm).every == 1


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--failures: -1"):
        Failures(lost_per_day=-1.0)
    with pytest.raises(ConfigError, match="--restart: inf"):
        Failures(restart_s=math.inf)
