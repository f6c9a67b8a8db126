"""The result of a simulation: times of tasks, bytes on links, memory and idle time of workers."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from distflow.config.model_shape import Floats
from distflow.plan.layout import format_ranks
from distflow.plan.tasks import Task
from distflow.simulate.memory import Memory
from distflow.util.arrays import Ints


@dataclass(frozen=True)
class TaskTime:
    """When a task runs, from its first worker's start to its last one's end.

    `elapsed_s` is the time of its slowest worker, without waits for others to start; `mean_busy_s` is the mean time of
    computing or communicating.
    """

    name: str
    kind: str  # load, move, run, weights
    start_s: float
    end_s: float
    elapsed_s: float
    mean_busy_s: float
    bytes: float = 0.0  # payload between workers
    network_bytes: float = 0.0  # between hosts, headers included


@dataclass(frozen=True)
class TaskSpan:
    """A task on the timeline of one rank set: done at `end_s`, and at `mean_end_s` if no worker waited for another."""

    name: str
    kind: str
    start_s: float
    mean_end_s: float
    end_s: float


@dataclass(frozen=True)
class RankSet:
    """Ranks with the same chain of tasks, and the fractions of the step in which they compute, communicate and wait."""

    ranks: tuple[int, ...]
    compute: float
    communicate: float
    idle: float
    longest_s: float  # computing and communicating, of its busiest worker
    spans: tuple[TaskSpan, ...]
    memory: Memory


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of one step through the network links: of the busiest and of the mean link, sent or received."""

    busiest: float
    mean: float
    per: str  # worker or host

    @property
    def ratio(self) -> float:
        return self.busiest / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class TaskTimes:
    """One task on each of its ranks: when the rank starts and ends it, and how long it is busy."""

    task: Task | None  # None: the metrics at the end of the step
    ranks: Ints
    start: Floats
    end: Floats
    busy: Floats


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step."""

    step_s: float
    tasks: tuple[TaskTime, ...]
    rank_sets: tuple[RankSet, ...]
    links: LinkBytes
    local_bytes: float  # between workers of a host, all together
    messages: float  # sent by the worker that sends most
    control_cpu_s: float  # spent on messages by the worker that spends most
    all_cpu_s: float  # by all workers
    tokens: float
    workers: int
    events: int
    notes: tuple[str, ...] = ()
    samples: int = 0
    sent: Floats = field(default_factory=lambda: np.zeros(0), repr=False)  # over the network, by rank
    recorded: tuple[TaskTimes, ...] = field(default=(), repr=False)

    @property
    def tokens_per_worker_s(self) -> float:
        return self.tokens / self.step_s / self.workers if self.step_s else 0.0

    def task(self, name: str) -> TaskTime:
        return next(t for t in self.tasks if t.name == name)

    def seconds_of(self, *kinds: str) -> float:
        """Returns the seconds of the slowest worker in all tasks of these kinds, waiting not included."""
        return sum(t.elapsed_s for t in self.tasks if t.kind in kinds)

    def pipelined_s(self, staleness: float) -> float:
        """Returns a forecast of the step if rank sets worked on different steps, at most `staleness` apart.

        A step then takes as long as the busiest rank set; and a sample must complete the cycle in time.
        """
        if not staleness or len(self.rank_sets) == 1:
            return self.step_s
        return max(self.step_s / (1 + staleness), *(r.longest_s for r in self.rank_sets))

    @property
    def data_plane_s(self) -> float:
        return self.seconds_of("move", "weights", "control")

    def to_json(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "data_plane_s": self.data_plane_s,
            "tokens_per_worker_s": self.tokens_per_worker_s,
            "workers": self.workers,
            "samples": self.samples,
            "tasks": [asdict(t) for t in self.tasks],
            "links": asdict(self.links) | {"busiest_over_mean": self.links.ratio, "local_bytes": self.local_bytes},
            "messages": self.messages,
            "control_cpu_s": self.control_cpu_s,
            "rank_sets": [
                {
                    "ranks": format_ranks(r.ranks),
                    "compute": r.compute,
                    "communicate": r.communicate,
                    "idle": r.idle,
                    "longest_s": r.longest_s,
                    "memory": asdict(r.memory) | {"peak": r.memory.peak},
                    "spans": [asdict(s) for s in r.spans],
                }
                for r in self.rank_sets
            ],
            "events": self.events,
            "notes": list(self.notes),
        }
