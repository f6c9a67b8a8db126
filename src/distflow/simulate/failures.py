"""Hosts fail: what of the time is useful, and how often to save.

Failures are independent and come at a constant rate. One of them stops all workers, which restart from the newest
complete checkpoint. Saving holds all workers up for a time; writing goes on behind the next steps.
"""

import math
from dataclasses import dataclass

from distflow.errors import ConfigError

DAY = 86_400.0
# Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs, 2,048 hosts.
LOST_PER_DAY = 3.8
HOSTS = 1000  # of so many


@dataclass(frozen=True)
class Failures:
    """`lost_per_day` of 1,000 hosts; `restart_s` from a failure to the first step after it."""

    lost_per_day: float = LOST_PER_DAY
    restart_s: float = 300.0
    save_s: float = 1.0  # for which saving holds the workers up
    write_s: float = 60.0  # from the save until the checkpoint is complete: a failure before goes one checkpoint back

    def __post_init__(self) -> None:
        for name, key in (
            ("--failures", "lost_per_day"),
            ("--restart", "restart_s"),
            ("--save", "save_s"),
            ("--write", "write_s"),
        ):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}: {value:g}; give a number, 0 or more")

    def mean_time_s(self, hosts: int) -> float:
        """Returns the mean time between failures of any of these hosts."""
        rate = self.lost_per_day * hosts / HOSTS / DAY
        return 1 / rate if rate else math.inf


@dataclass(frozen=True)
class Goodput:
    """Shares of the time in steps that are not lost, saving every `every` steps; steps of 0 mean never."""

    workers: int
    hosts: int
    mean_time_s: float  # between failures
    every: int
    goodput: float
    best_every: int
    best: float
    young_s: float
    daly_s: float


def goodput(step_s: float, every: int, hosts: int, given: Failures) -> float:
    """Returns the share of the time that is useful if a checkpoint is made after every so many steps.

    With failures at a rate λ, work of w seconds between two restarts of the clock takes (e^(λw) − 1) (1/λ + restart) on
    average. While a checkpoint is being written a failure costs the steps since the one before it as well.
    """
    useful = every * step_s
    work, mean = useful + given.save_s, given.mean_time_s(hosts)
    if math.isinf(mean):
        return useful / work
    if work / mean > 500:
        return 0.0
    again = min(given.write_s, work) / mean * useful  # steps of the one before, which a failure then takes along
    return useful / (math.expm1(work / mean) * (mean + given.restart_s) + again)


def best_interval(step_s: float, hosts: int, given: Failures) -> int:
    """Returns the number of steps between checkpoints with the highest goodput, which has one maximum."""
    low, high = 1, 2
    while goodput(step_s, high, hosts, given) > goodput(step_s, high // 2, hosts, given) and high < 1 << 30:
        high *= 2
    while high - low > 2:
        a, b = low + (high - low) // 3, high - (high - low) // 3
        if goodput(step_s, a, hosts, given) < goodput(step_s, b, hosts, given):
            low = a
        else:
            high = b
    return max(range(low, high + 1), key=lambda k: goodput(step_s, k, hosts, given))


def young(save_s: float, mean_time_s: float) -> float:
    """Returns Young's interval between checkpoints, in seconds."""
    return math.sqrt(2 * save_s * mean_time_s)


def daly(save_s: float, mean_time_s: float) -> float:
    """Returns Daly's interval, of higher order than Young's."""
    if math.isinf(mean_time_s) or not save_s:
        return young(save_s, mean_time_s)
    if save_s >= 2 * mean_time_s:
        return mean_time_s
    x = save_s / (2 * mean_time_s)
    return young(save_s, mean_time_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def survive(step_s: float, every: int, workers: int, workers_per_host: int, given: Failures) -> Goodput:
    """Returns the goodput on so many workers, the whole host of a failed one being lost. The step is taken to be the
    same on any number of workers."""
    hosts = math.ceil(workers / workers_per_host)
    mean, every = given.mean_time_s(hosts), max(1, every)
    best = best_interval(step_s, hosts, given)
    return Goodput(
        workers,
        hosts,
        mean,
        every,
        goodput(step_s, every, hosts, given),
        best,
        goodput(step_s, best, hosts, given),
        young(given.save_s, mean),
        daly(given.save_s, mean),
    )
