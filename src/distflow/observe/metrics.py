"""The metrics of a step: logged by each worker, reduced over all of them in the background, written by rank 0."""

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
# The slowest worker as one number that is reduced by `max`: its time in units of 0.1 ms × MAX_RANKS + its rank. Exact
# in a float for times of days.
BUSIEST, MAX_RANKS = "perf/busiest", 1 << 20


class StepMetrics:
    """One worker's metrics of one step. Who logs a metric says how it is reduced; the name does not matter."""

    def __init__(self) -> None:
        self.totals: dict[Key, tuple[float, float]] = {}  # (value so far, count)

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        """Logs a value. A `mean` over all workers is weighted by counts: `value` is the mean of `count` things."""
        if reduce not in REDUCES:
            raise DistflowError(f"metric '{name}': unknown reduce '{reduce}'{suggest(reduce, REDUCES)}")
        if not count:  # on a worker without samples, where a mean is not a number
            return
        total, n = self.totals.get((name, reduce), (_neutral(reduce), 0))
        match reduce:
            case "max":
                total = max(total, float(value))
            case "min":
                total = min(total, float(value))
            case "mean":
                total += float(value) * count
            case "sum":
                total += float(value)
        self.totals[name, reduce] = total, n + count

    def time(self, name: str, seconds: float) -> None:
        self.log(f"timing_s/{name}", seconds)
        self.log(f"timing_max_s/{name}", seconds, reduce="max")

    def work(self, rank: int, seconds: float) -> None:
        """Logs how long this worker's nodes took, and which rank's took longest."""
        self.log("perf/work_s", seconds)
        self.log(BUSIEST, round(seconds * 10_000) * MAX_RANKS + rank, reduce="max")

    def with_prefix(self, prefix: str) -> "StepMetrics":
        """Returns a view of these metrics that puts `prefix` before the names of those that it logs."""
        return _Prefixed(self, prefix)

    def sampling(self, prompts: SampledPrompts | None) -> None:
        """Logs how dynamic sampling filled the step; every worker has the same numbers."""
        assert prompts is not None
        for name in ("rounds", "discarded", "filled"):
            self.log(f"sampling/{name}", getattr(prompts, name))

    def traffic(self, traffic: Traffic) -> None:
        """Logs bytes: the mean over workers, and the maximum."""
        for name in ("sent", "received", "local"):
            self.log(f"data/bytes_{name}", getattr(traffic, name))
            self.log(f"data/bytes_{name}_max", getattr(traffic, name), reduce="max")
        if traffic.imbalance is not None:
            self.log("data/imbalance", traffic.imbalance)


class _Prefixed(StepMetrics):
    def __init__(self, metrics: StepMetrics, prefix: str) -> None:
        self.totals, self.prefix = metrics.totals, prefix

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        super().log(self.prefix + name, value, count, reduce)


Sink = Callable[[int, dict[str, float]], None]


class MetricsReducer:
    """Reduces metrics step by step in a thread of its own, so that no step waits for the log of another.

    `process_group` is used for nothing else (None: one worker); `sink` gets the result on rank 0.
    """

    MAX_BACKLOG = 2  # steps that a worker may run ahead of the metrics of the slowest one

    def __init__(self, process_group: dist.ProcessGroup | None, sink: Sink | None) -> None:
        self.process_group, self.sink = process_group, sink
        self._keys: list[Key] = []  # the same on all ranks, in the same order
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._pending: list[Future[None]] = []

    def submit(self, step: int, metrics: StepMetrics) -> None:
        self._pending.append(self._thread.submit(self._reduce, step, metrics))

    def wait(self, backlog: int = MAX_BACKLOG) -> None:
        """Waits until at most `backlog` steps are outstanding; raises what went wrong in the thread."""
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
        result, any_new = self._all_reduce(self._keys, metrics, len(new))
        if any_new:  # some worker has logged a metric that not all know: agree on the names first
            agreed = self._agree_on(new)
            self._keys += agreed
            result |= self._all_reduce(agreed, metrics, 0)[0]
        return result

    def _all_reduce(self, keys: list[Key], metrics: StepMetrics, new: int) -> tuple[dict[str, float], bool]:
        sums = torch.zeros(2 * len(keys) + 1, dtype=torch.float64)
        maxima = torch.full((len(keys) + 1,), -math.inf, dtype=torch.float64)
        sums[-1] = new
        for i, key in enumerate(keys):
            value, count = metrics.totals.get(key, (_neutral(key[1]), 0.0))
            if key[1] in ("mean", "sum"):
                sums[2 * i] = value
            elif count:
                maxima[i] = value if key[1] == "max" else -value
            sums[2 * i + 1] = count
        if self.process_group is not None:
            dist.all_reduce(sums, group=self.process_group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.process_group)
        result = {}
        for i, (name, reduce) in enumerate(keys):
            total, count, maximum = float(sums[2 * i]), float(sums[2 * i + 1]), float(maxima[i])
            if count:  # a metric that no worker logged in this step is absent from it
                result[name] = {"mean": total / count, "sum": total, "max": maximum, "min": -maximum}[reduce]
        return result, bool(sums[-1])

    def _agree_on(self, new: list[Key]) -> list[Key]:
        """Returns the union of all workers' new keys, sorted."""
        own = json.dumps(new).encode()
        texts = [own] if self.process_group is None else self._gather(own)
        union = sorted({(name, reduce) for text in texts for name, reduce in json.loads(text)})
        names = [n for n, _ in (*self._keys, *union)]
        for name in names:
            if names.count(name) > 1:
                raise DistflowError(f"metric '{name}' is reduced in two ways; log it with one `reduce` everywhere")
        return union

    def _gather(self, own: bytes) -> list[bytes]:
        size = torch.tensor([len(own)])
        dist.all_reduce(size, dist.ReduceOp.MAX, group=self.process_group)
        row = torch.from_numpy(np.frombuffer(own.ljust(int(size)), np.uint8).copy())
        out = torch.empty(dist.get_world_size(self.process_group) * int(size), dtype=torch.uint8)
        all_gather(out, row, group=self.process_group)
        return [bytes(r.tolist()) for r in out.view(-1, int(size))]


def _neutral(reduce: Reduce) -> float:
    return {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}[reduce]
