"""The plan: partitions, tasks, and the chain of tasks of each rank."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distflow.flow.graph import SOURCE, Flow
from distflow.plan.layout import Layout, format_ranks


@dataclass(frozen=True)
class Partition:
    """A way the samples of a step are dealt out: nodes that share one exchange nothing."""

    id: str
    layout: Layout
    whole: bool  # samples of one prompt are together
    balance: str | None  # the field whose lengths are evened out over the cells
    uneven: bool = False  # cells may have any number of samples: what a refill has left where

    def __str__(self) -> str:
        wishes = [w for w, on in (("whole groups", self.whole), (f"balanced by {self.balance}", self.balance)) if on]
        return f"{self.layout} on {format_ranks(self.layout.ranks)}" + (f", {', '.join(wishes)}" if wishes else "")


Touch = tuple[Partition, str]


@dataclass(frozen=True)
class Load:
    """The loader fills the data columns of one step."""

    partition: Partition
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return "load"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.layout.ranks

    def touches(self) -> Iterator[Touch]:
        yield from ((self.partition, f) for f in self.fields)


@dataclass(frozen=True)
class Move:
    """Fields go from one partition to another, in one all-to-all."""

    id: str
    src: Partition
    dst: Partition
    fields: tuple[str, ...]
    deals: bool  # the first move into a partition decides which sample goes where
    expected_bytes: int

    @property
    def name(self) -> str:
        return f"move {self.id} ({', '.join(self.fields)})"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.src.layout.ranks, *self.dst.layout.ranks}))

    def touches(self) -> Iterator[Touch]:
        for f in self.fields:
            yield self.src, f
            yield self.dst, f


@dataclass(frozen=True)
class Run:
    """A node's function."""

    node: str
    partition: Partition
    reads: tuple[str, ...]
    writes: tuple[str, ...]  # what is kept of its writes: fields that somebody reads

    @property
    def name(self) -> str:
        return self.node

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.layout.ranks

    def touches(self) -> Iterator[Touch]:
        yield from ((self.partition, f) for f in (*self.reads, *self.writes))


@dataclass(frozen=True)
class Weights:
    """A role's newest weights go from where it is trained to where its next node needs them."""

    role: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.role} weights"

    def touches(self) -> Iterator[Touch]:
        return iter(())


@dataclass(frozen=True)
class Free:
    """No later task of this partition reads these fields."""

    partition: Partition
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"free {', '.join(self.fields)}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.layout.ranks

    def touches(self) -> Iterator[Touch]:
        return iter(())


@dataclass(frozen=True)
class Refill:
    """Samples that `field` refuses are dropped; all tasks before this one are run again, until the step is full.

    What was kept stays where it was: `carried` says which fields, from which partition to which uneven one.
    """

    node: str
    partition: Partition
    field: str
    rounds: int
    unit: int  # a draw is a multiple of so many prompts
    carried: tuple[tuple[Partition, Partition, tuple[str, ...]], ...]
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return "refill"

    def touches(self) -> Iterator[Touch]:
        yield self.partition, self.field
        for src, dst, fields in self.carried:
            for f in fields:
                yield src, f
                yield dst, f

    def taken(self) -> set[tuple[str, str]]:
        """(partition, field) that are gone when it is done."""
        return {(self.partition.id, self.field), *((p.id, f) for p, _, fields in self.carried for f in fields)}


Task = Load | Move | Run | Weights | Refill | Free


@dataclass(frozen=True)
class Edge:
    """What one node hands to another; `moves` tells whether it changes partition on the way."""

    writer: str
    reader: str
    fields: tuple[str, ...]
    moves: bool
    expected_bytes: int  # of all samples of a step; what a move sends of it may be less, or more to replicas


@dataclass(frozen=True)
class Plan:
    """The same on every rank. `tasks` is the global order; `chain(rank)` is what one rank does of it."""

    flow: Flow
    workers: int
    groups: Mapping[str, tuple[int, ...]]
    samples: int
    repeat: int
    bytes: Mapping[str, int]  # field → expected bytes per sample
    partitions: tuple[Partition, ...]
    home: Mapping[str, str]  # node → partition
    tasks: tuple[Task, ...]

    def chain(self, rank: int) -> tuple[Task, ...]:
        return tuple(t for t in self.tasks if rank in _rank_set(t.ranks))

    def partition_of(self, node_id: str) -> Partition:
        return self._partition[self.home[node_id]]

    @cached_property
    def _partition(self) -> dict[str, Partition]:
        return {p.id: p for p in self.partitions}

    @cached_property
    def refill(self) -> Refill | None:
        return next((t for t in self.tasks if isinstance(t, Refill)), None)

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(t for t in self.tasks if isinstance(t, Move))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        found: dict[tuple[str, str], list[str]] = {}
        for n in self.flow.order:
            for f in n.reads:
                found.setdefault((self.flow.writer[f], n.id), []).append(f)
        return tuple(
            Edge(w, r, tuple(fs), self.home[w] != self.home[r], self.samples * sum(self.bytes[f] for f in fs))
            for (w, r), fs in found.items()
        )

    def chains(self) -> dict[tuple[int, ...], tuple[Task, ...]]:
        """Ranks that do the same → what they do."""
        same: dict[tuple[int, ...], list[int]] = {}
        sets = [_rank_set(t.ranks) for t in self.tasks]
        for rank in range(self.workers):
            same.setdefault(tuple(i for i, s in enumerate(sets) if rank in s), []).append(rank)
        return {tuple(ranks): tuple(self.tasks[i] for i in key) for key, ranks in same.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "flow": self.flow.name,
            "workers": self.workers,
            "samples": self.samples,
            "samples_per_prompt": self.repeat,
            "groups": {g: format_ranks(r) for g, r in self.groups.items()},
            "partitions": [
                {
                    "id": p.id,
                    "ranks": format_ranks(p.layout.ranks),
                    "dp": p.layout.dp,
                    "tp": p.layout.tp,
                    "whole_groups": p.whole,
                    "balance": p.balance,
                }
                for p in self.partitions
            ],
            "nodes": [
                {
                    "id": SOURCE,
                    "role": SOURCE,
                    "writes": list(self.flow.source),
                    "partition": self.home[SOURCE],
                },
                *(
                    {
                        "id": n.id,
                        "role": n.role,
                        "type": n.type,
                        "call": n.call,
                        "reads": list(n.reads),
                        "writes": list(n.writes),
                        "after": list(n.after),
                        "params": dict(n.params),
                        "partition": self.home[n.id],
                        **({"prefix": n.prefix} if n.prefix else {}),
                    }
                    for n in self.flow.order
                ),
            ],
            "edges": [
                {
                    "from": e.writer,
                    "to": e.reader,
                    "fields": list(e.fields),
                    "moves": e.moves,
                    "expected_bytes": e.expected_bytes,
                }
                for e in self.edges
            ],
            "tasks": [_task_json(t) for t in self.tasks],
            "chains": {format_ranks(ranks): [t.name for t in tasks] for ranks, tasks in self.chains().items()},
        }

    @cached_property
    def hash(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _task_json(t: Task) -> dict[str, Any]:
    match t:
        case Load():
            return {"do": "load", "partition": t.partition.id, "fields": list(t.fields)}
        case Move():
            return {
                "do": "move",
                "id": t.id,
                "from": t.src.id,
                "to": t.dst.id,
                "fields": list(t.fields),
                "deals": t.deals,
                "expected_bytes": t.expected_bytes,
            }
        case Run():
            return {"do": "run", "node": t.node, "partition": t.partition.id}
        case Weights():
            return {"do": "weights", "role": t.role, "ranks": format_ranks(t.ranks)}
        case Refill():
            return {"do": "refill", "keep": t.field, "rounds": t.rounds, "unit": t.unit}
        case Free():
            return {"do": "free", "partition": t.partition.id, "fields": list(t.fields)}


_sets: dict[tuple[int, ...], frozenset[int]] = {}


def _rank_set(ranks: tuple[int, ...]) -> frozenset[int]:
    """Membership in O(1); the same few rank tuples are asked for again and again."""
    if ranks not in _sets:
        _sets[ranks] = frozenset(ranks)
    return _sets[ranks]
