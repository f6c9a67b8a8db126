"""Which worker the others wait for, step after step."""

from collections import Counter, defaultdict
from pathlib import Path

from distflow.observe.heartbeat import read
from distflow.observe.metrics import BUSIEST, RANKS

WORTH_TELLING = 1.2  # times the mean
NO_NODES = ("step", "move", "load", "eval")  # names under which other times are logged


class Stragglers:
    """Seen by rank 0 in the reduced metrics: no worker tells its time to another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of the workers' records
        self.steps = 0
        self._slowest: Counter[int] = Counter()
        self._ratios: defaultdict[int, float] = defaultdict(float)  # of a rank, where it was the slowest
        self._behind = 0.0  # seconds that the slowest took beyond the mean, over all steps
        self._behind_in: defaultdict[str, float] = defaultdict(float)  # the same of each node

    def look(self, step: int, metrics: dict[str, float]) -> None:
        """Replace the reduced number by the rank in it and by how far it is behind."""
        if BUSIEST not in metrics:
            return
        units, rank = divmod(int(metrics.pop(BUSIEST)), RANKS)
        seconds, mean = units / 10_000, metrics["perf/work_s"]
        metrics["perf/slowest_rank"], metrics["perf/straggle"] = rank, max(1.0, seconds / mean) if mean else 1.0
        if step < 0:
            return
        self.steps += 1
        self._slowest[rank] += 1
        self._ratios[rank] += metrics["perf/straggle"]
        self._behind += seconds - mean
        for name, value in metrics.items():
            node = name.removeprefix("timing_max_s/")
            if node != name and node not in NO_NODES and not node.endswith("_weights"):
                self._behind_in[node] += value - metrics[f"timing_s/{node}"]

    def told(self) -> str | None:
        """One line, where it is one worker more often than not."""
        if not self.steps:
            return None
        rank, times = self._slowest.most_common(1)[0]
        ratio = self._ratios[rank] / times
        if times <= self.steps / 2 or ratio <= WORTH_TELLING:
            return None
        record = read(self.folder, rank)
        host = f" ({record.host})" if record else ""
        told = f"rank {rank}{host} was the slowest in {times} of {self.steps} steps, {ratio:.1f} times the mean"
        node, behind = max(self._behind_in.items(), key=lambda kv: kv[1], default=("", 0.0))
        return f"{told}; mostly in '{node}'" if behind > self._behind / 2 else told
