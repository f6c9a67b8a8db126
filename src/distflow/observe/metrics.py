"""Metrics of a step, reduced over workers by sums and counts, in the background; rank 0 writes the log."""

import json
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist

from distflow.data.context import Reduce
from distflow.data.coordinator import Traffic
from distflow.data.dynamic_sampling import SampledPrompts
from distflow.data.transport import all_gather
from distflow.errors import DistflowError, PeerLostError, suggest

REDUCES: tuple[Reduce, ...] = get_args(Reduce)
Key = tuple[str, Reduce]
BUSIEST, RANKS = "perf/busiest", 1 << 20  # a time in units of 0.1 ms and below it the rank: exact in a float for days


class StepMetrics:
    """One worker's numbers of one step. How one is reduced is said where it is logged, never guessed from its name."""

    def __init__(self) -> None:
        self.totals: dict[Key, tuple[float, float]] = {}  # (value so far, count)

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        """`mean` is weighted by counts over all workers: `value` is the mean of `count` things."""
        if reduce not in REDUCES:
            raise DistflowError(f"metric '{name}': unknown reduce '{reduce}'{suggest(reduce, REDUCES)}")
        old, n = self.totals.get((name, reduce), (_neutral(reduce), 0))
        match reduce:
            case "max":
                new = max(old, float(value))
            case "min":
                new = min(old, float(value))
            case "mean":
                new = old + float(value) * count
            case "sum":
                new = old + float(value)
        self.totals[name, reduce] = new, n + count

    def time(self, name: str, seconds: float) -> None:
        self.log(f"timing_s/{name}", seconds)
        self.log(f"timing_max_s/{name}", seconds, reduce="max")

    def work(self, rank: int, seconds: float) -> None:
        """How long this worker's nodes took, and who took longest: a number that is reduced like any other."""
        self.log("perf/work_s", seconds)
        self.log(BUSIEST, round(seconds * 10_000) * RANKS + rank, reduce="max")

    def under(self, prefix: str) -> "StepMetrics":
        """The same metrics, for names that begin with `prefix`."""
        return _Under(self, prefix)

    def sampling(self, drawn: SampledPrompts | None) -> None:
        """How the prompts of a step were found; every worker knows the same."""
        assert drawn is not None
        for name in ("rounds", "discarded", "filled"):
            self.log(f"sampling/{name}", getattr(drawn, name))

    def traffic(self, t: Traffic) -> None:
        """Bytes: the mean over workers, and the busiest one."""
        for name, value in (("bytes_sent", t.sent), ("bytes_received", t.received), ("bytes_local", t.local)):
            self.log(f"data/{name}", value)
            self.log(f"data/{name}_max", value, reduce="max")
        if t.imbalance is not None:
            self.log("data/imbalance", t.imbalance)


class _Under(StepMetrics):
    def __init__(self, whole: StepMetrics, prefix: str) -> None:
        self.totals, self.prefix = whole.totals, prefix

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        super().log(self.prefix + name, value, count, reduce)


Sink = Callable[[int, dict[str, float]], None]


class MetricsReducer:
    """Reduces tallies step after step in a thread of its own, so that no step waits for the log of another.

    `group` is a process group for this alone (None: one worker); `sink` gets the result on rank 0.
    """

    BACKLOG = 2  # steps a worker may run ahead of the slowest one's metrics

    def __init__(self, group: dist.ProcessGroup | None, sink: Sink | None) -> None:
        self.group, self.sink = group, sink
        self._keys: list[Key] = []  # known to all ranks, in the same order
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._pending: list[Future[None]] = []

    def submit(self, step: int, metrics: StepMetrics) -> None:
        self._pending.append(self._thread.submit(self._reduce, step, metrics))

    def wait(self, backlog: int = BACKLOG) -> None:
        """Until at most `backlog` steps are outstanding; raises what went wrong in the thread."""
        while self._pending and (len(self._pending) > backlog or self._pending[0].done()):
            self._pending.pop(0).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _reduce(self, step: int, metrics: StepMetrics) -> None:
        try:
            result = self._reduced(metrics)
        except RuntimeError as e:
            raise PeerLostError(f"lost a worker while reducing metrics: {str(e).splitlines()[0]}") from e
        if self.sink is not None:
            self.sink(step, result)

    def _reduced(self, metrics: StepMetrics) -> dict[str, float]:
        new = [k for k in metrics.totals if k not in self._keys]
        found, strangers = self._sum(self._keys, metrics, len(new))
        if strangers:  # somebody has a metric that not everybody knows of: agree on the names first
            fresh = self._agree_on(new)
            self._keys += fresh
            found |= self._sum(fresh, metrics, 0)[0]
        return found

    def _sum(self, keys: list[Key], metrics: StepMetrics, new: int) -> tuple[dict[str, float], bool]:
        added = torch.zeros(2 * len(keys) + 1, dtype=torch.float64)
        highest = torch.full((len(keys) + 1,), -math.inf, dtype=torch.float64)
        added[-1] = new
        for i, key in enumerate(keys):
            value, count = metrics.totals.get(key, (_neutral(key[1]), 0.0))
            if key[1] in ("mean", "sum"):
                added[2 * i] = value
            elif count:
                highest[i] = value if key[1] == "max" else -value
            added[2 * i + 1] = count
        if self.group is not None:
            dist.all_reduce(added, group=self.group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        found = {}
        for i, (name, reduce) in enumerate(keys):
            total, count, top = float(added[2 * i]), float(added[2 * i + 1]), float(highest[i])
            if count:  # a metric that nobody logged in this step is absent from it
                found[name] = {"mean": total / count, "sum": total, "max": top, "min": -top}[reduce]
        return found, bool(added[-1])

    def _agree_on(self, new: list[Key]) -> list[Key]:
        """The union of everybody's new keys, sorted."""
        mine = json.dumps(new).encode()
        everybody = [mine] if self.group is None else self._gather(mine)
        union = sorted({(name, reduce) for text in everybody for name, reduce in json.loads(text)})
        names = [n for n, _ in (*self._keys, *union)]
        for name in names:
            if names.count(name) > 1:
                raise DistflowError(f"metric '{name}' is reduced in two ways; log it with one `reduce` everywhere")
        return union

    def _gather(self, mine: bytes) -> list[bytes]:
        size = torch.tensor([len(mine)])
        dist.all_reduce(size, dist.ReduceOp.MAX, group=self.group)
        row = torch.from_numpy(np.frombuffer(mine.ljust(int(size)), np.uint8).copy())
        out = torch.empty(dist.get_world_size(self.group) * int(size), dtype=torch.uint8)
        all_gather(out, row, group=self.group)
        return [bytes(r.tolist()) for r in out.view(-1, int(size))]


def _neutral(reduce: Reduce) -> float:
    return {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}[reduce]
