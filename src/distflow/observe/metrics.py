"""The metrics of a step: logged by each worker, reduced over all of them after the step, written by rank 0."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import get_args

import torch
from torch import Tensor

from distflow.batch.context import Reduce
from distflow.comm.collectives import Communication, all_reduce, all_reduce_bytes
from distflow.coordinator.coordinator import StepTraffic
from distflow.coordinator.dynamic_sampling import SampledPrompts
from distflow.errors import DistflowError, suggest

REDUCES: tuple[Reduce, ...] = get_args(Reduce)
Key = tuple[str, Reduce]
# The slowest worker as one number that is reduced by `max`: its time in units of 0.1 ms × MAX_RANKS + its rank. Exact
# in a float for times of days.
BUSIEST, MAX_RANKS = "perf/busiest", 1 << 20


class StepMetrics:
    """One worker's metrics of one step. The node that logs one says how it is reduced; the name does not matter."""

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

    def merge(self, totals: Mapping[Key, tuple[float, float]]) -> None:
        """Adds the values of other metrics."""
        for key, (value, count) in totals.items():
            total, n = self.totals.get(key, (_neutral(key[1]), 0))
            combined = {"max": max, "min": min}.get(key[1], float.__add__)(float(total), float(value))
            self.totals[key] = combined, n + count

    def time(self, name: str, seconds: float) -> None:
        self.log(f"timing_s/{name}", seconds)
        self.log(f"timing_max_s/{name}", seconds, reduce="max")

    def work(self, rank: int, seconds: float, ranks_alike: bool = True) -> None:
        """Logs how long this worker's nodes took, and which rank's took longest, if all have the same work."""
        self.log("perf/work_s", seconds)
        if ranks_alike:
            self.log(BUSIEST, round(seconds * 10_000) * MAX_RANKS + rank, reduce="max")

    def with_prefix(self, prefix: str) -> "StepMetrics":
        """Returns a view of these metrics that puts `prefix` before each name it logs."""
        return _Prefixed(self, prefix)

    def without_sums(self) -> "StepMetrics":
        """Returns a view that drops sums, for a replica whose samples another worker counts."""
        return _WithoutSums(self)

    def sampling(self, prompts: SampledPrompts | None) -> None:
        """Logs how dynamic sampling filled the step; every worker has the same numbers."""
        assert prompts is not None
        for name in ("rounds", "discarded", "filled"):
            self.log(f"sampling/{name}", getattr(prompts, name))

    def traffic(self, traffic: StepTraffic) -> None:
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


class _WithoutSums(StepMetrics):
    def __init__(self, metrics: StepMetrics) -> None:
        self.totals, self.metrics = metrics.totals, metrics

    def log(self, name: str, value: float, count: float = 1, reduce: Reduce = "mean") -> None:
        if reduce != "sum":
            self.metrics.log(name, value, count, reduce)


Sink = Callable[[int, dict[str, float]], None]


class MetricsReducer:
    """Reduces the metrics of a step over all `ranks`; `sink` gets the result on the rank that has one.

    The sink runs in a thread of its own, so that no step waits for the log of another.
    """

    MAX_BACKLOG = 2  # steps that a run may be ahead of its log

    def __init__(self, rank: int, ranks: Sequence[int], sink: Sink | None, kept: str | None = None) -> None:
        """`kept`: a metric whose values can be asked for once their steps are reduced, whatever becomes of the log."""
        self.rank, self.ranks, self.sink = rank, ranks, sink
        self._kept, self._values = kept, dict[int, float]()
        self._keys: list[Key] = []  # the same on all ranks, in the same order
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._pending: list[Future[None]] = []

    def reduce(self, step: int, metrics: StepMetrics, vote: bool = False) -> Communication[bool]:
        """Reduces the metrics of a step. Returns whether any rank's `vote` is true."""
        new = [k for k in metrics.totals if k not in set(self._keys)]
        result, any_new, any_vote = yield from self._all_reduce(self._keys, metrics, bool(new), vote)
        if any_new:  # some worker has logged a metric that not all know: agree on the names first
            agreed = yield from self._agree_on(new)
            self._keys += agreed
            result |= (yield from self._all_reduce(agreed, metrics, False, False))[0]
        if self._kept in result and math.isfinite(result[self._kept]):
            self._values[step] = result[self._kept]
        if self.sink is not None:
            self._pending.append(self._thread.submit(self.sink, step, result))
            self.wait(self.MAX_BACKLOG)
        return any_vote

    def take_kept(self, step: int) -> dict[str, float]:
        """Returns the kept metric of a step by its name, if it has one, and forgets those of steps before."""
        for earlier in [s for s in list(self._values) if s < step]:  # another thread may reduce at this moment
            del self._values[earlier]
        value = self._values.get(step)
        return {} if self._kept is None or value is None else {self._kept: value}

    def wait(self, backlog: int = 0) -> None:
        """Waits until at most `backlog` steps are not yet logged; raises what went wrong in the sink."""
        while self._pending and (len(self._pending) > backlog or self._pending[0].done()):
            self._pending.pop(0).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _all_reduce(
        self, keys: list[Key], metrics: StepMetrics, new: bool, vote: bool
    ) -> Communication[tuple[dict[str, float], bool, bool]]:
        """Returns the reduced metrics of these keys, and whether any rank has new ones, and a vote."""
        sums = torch.zeros(2 * len(keys), dtype=torch.float64)
        maxima = torch.full((len(keys) + 2,), -math.inf, dtype=torch.float64)
        for i, key in enumerate(keys):
            value, count = metrics.totals.get(key, (_neutral(key[1]), 0.0))
            if key[1] in ("mean", "sum"):
                sums[2 * i] = value
            elif count:
                maxima[i] = value if key[1] == "max" else -value
            sums[2 * i + 1] = count
        maxima[-2], maxima[-1] = float(new), float(vote)
        parts = len(sums), len(maxima)

        def combine(a: Tensor, b: Tensor) -> Tensor:
            (sums_a, maxima_a), (sums_b, maxima_b) = a.split(parts), b.split(parts)
            return torch.cat((sums_a + sums_b, torch.maximum(maxima_a, maxima_b)))

        reduced = yield from all_reduce(self.rank, self.ranks, torch.cat((sums, maxima)), combine)
        sums, maxima = reduced.split(parts)
        result = {}
        for i, (name, reduce) in enumerate(keys):
            total, count, maximum = float(sums[2 * i]), float(sums[2 * i + 1]), float(maxima[i])
            if count:  # a metric that no worker logged in this step is absent from it
                result[name] = {"mean": total / count, "sum": total, "max": maximum, "min": -maximum}[reduce]
        return result, bool(maxima[-2]), bool(maxima[-1])

    def _agree_on(self, new: list[Key]) -> Communication[list[Key]]:
        """Returns the union of all workers' new keys, sorted."""

        def union(a: bytes, b: bytes) -> bytes:
            return json.dumps(sorted({(name, reduce) for text in (a, b) for name, reduce in json.loads(text)})).encode()

        own = union(json.dumps(new).encode(), b"[]")
        text = yield from all_reduce_bytes(self.rank, self.ranks, own, union)
        agreed: list[Key] = [(name, reduce) for name, reduce in json.loads(text)]
        counts = Counter(name for name, _ in (*self._keys, *agreed))
        for name, count in counts.items():
            if count > 1:
                raise DistflowError(f"metric '{name}' is reduced in two ways; log it with one `reduce` everywhere")
        return agreed


def _neutral(reduce: Reduce) -> float:
    return {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}[reduce]
