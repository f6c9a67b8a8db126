"""Finds the worker that the others wait for, from step to step."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from distflow.observe.metrics import BUSIEST, MAX_RANKS

REPORTED_FROM = 1.2  # times the mean
NOT_NODES = ("step", "move", "load", "eval")  # other times that are logged like those of nodes


class Stragglers:
    """Kept by rank 0 from the reduced metrics: no worker sends its times to another one."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = hosts  # by rank, if known
        self.steps = 0
        self._slowest: Counter[int] = Counter()
        self._ratios: defaultdict[int, float] = defaultdict(float)  # per rank, over the steps in which it was slowest
        self._behind = 0.0  # seconds by which the slowest was behind the mean, over all steps
        self._behind_in: defaultdict[str, float] = defaultdict(float)  # the same per node

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Replaces the encoded metric by the slowest rank and how far it is behind."""
        if BUSIEST not in metrics:
            return
        units, rank = divmod(int(metrics.pop(BUSIEST)), MAX_RANKS)
        seconds, mean = units / 10_000, metrics["perf/work_s"]
        metrics["perf/slowest_rank"], metrics["perf/straggle"] = rank, max(1.0, seconds / mean) if mean else 1.0
        if step == 0:
            return
        self.steps += 1
        self._slowest[rank] += 1
        self._ratios[rank] += metrics["perf/straggle"]
        self._behind += seconds - mean
        for name, value in metrics.items():
            node = name.removeprefix("timing_max_s/")
            if node != name and node not in NOT_NODES and not node.endswith("_weights"):
                self._behind_in[node] += value - metrics[f"timing_s/{node}"]

    def summary(self) -> str | None:
        """Returns one line if the same worker was the slowest in most steps."""
        if not self.steps:
            return None
        rank, times = self._slowest.most_common(1)[0]
        ratio = self._ratios[rank] / times
        if times <= self.steps / 2 or ratio <= REPORTED_FROM:
            return None
        host = f" ({self.hosts[rank]})" if self.hosts else ""
        line = f"rank {rank}{host} was the slowest in {times} of {self.steps} steps, {ratio:.1f} times the mean"
        node, behind = max(self._behind_in.items(), key=lambda kv: kv[1], default=("", 0.0))
        return f"{line}; mostly in '{node}'" if behind > self._behind / 2 else line
