"""The plan: partitions, tasks, and the chain of tasks that each rank runs."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from distflow.flow.graph import SOURCE, Flow
from distflow.plan.layout import Layout, format_ranks


@dataclass(frozen=True)
class Partition:
    """An assignment of the samples of a step to the replicas of a layout. Nodes of one partition exchange nothing."""

    id: str
    layout: Layout
    whole_groups: bool  # all samples of a prompt are in one replica
    balance: str | None  # the field whose lengths are balanced over the replicas
    uneven: bool = False  # after a resample or chunks: the sizes of replicas depend on the data
    chunk: tuple[int, int] | None = None  # (i, n): only the samples of the i-th of n chunks

    def largest_share(self, samples: int, group_size: int) -> int:
        """Returns the number of samples of the largest replica, unless the partition is uneven."""
        unit = group_size if self.whole_groups else 1
        return -(-samples // unit // self.layout.dp) * unit


Touch = tuple[Partition, str]  # a field that a task reads or writes, and where


@dataclass(frozen=True)
class Load:
    """Loads the data columns of one step."""

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
    """Moves fields from one partition to another, in one all-to-all."""

    id: str
    src: Partition
    dst: Partition
    fields: tuple[str, ...]
    assigns: bool  # the first move into a partition assigns samples to replicas
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
class RunNode:
    """Calls the function of a node."""

    node: str
    partition: Partition
    reads: tuple[str, ...]
    writes: tuple[str, ...]  # without fields that no node reads

    @property
    def name(self) -> str:
        return self.node

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.layout.ranks

    def touches(self) -> Iterator[Touch]:
        yield from ((self.partition, f) for f in (*self.reads, *self.writes))


@dataclass(frozen=True)
class SyncWeights:
    """Syncs weights of a role from training to generating ranks: the newest, or those of `delay` steps before."""

    role: str
    ranks: tuple[int, ...]
    source: Layout | None  # None: not trained
    target: Layout
    expected_bytes: int | None  # received by all ranks together; None: the model is unknown
    delay: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} weights"

    def touches(self) -> Iterator[Touch]:
        return iter(())


@dataclass(frozen=True)
class Free:
    """Frees fields that no later task of this partition reads."""

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
class Resample:
    """Drops the samples for which `field` is false and repeats all tasks before it until the step is full.

    Samples that are kept stay where they are: `carried` lists (partition, the uneven partition after it, fields).
    """

    node: str
    partition: Partition
    field: str
    rounds: int
    unit: int  # prompts are drawn in multiples of this number, if the step is large enough
    carried: tuple[tuple[Partition, Partition, tuple[str, ...]], ...]
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        return "resample"

    def touches(self) -> Iterator[Touch]:
        yield self.partition, self.field
        for src, dst, fields in self.carried:
            for f in fields:
                yield src, f
                yield dst, f

    def consumed(self) -> set[tuple[str, str]]:
        """Returns the (partition, field) pairs that no longer exist after this task."""
        return {(self.partition.id, self.field), *((p.id, f) for p, _, fields in self.carried for f in fields)}


@dataclass(frozen=True)
class Split:
    """Sends the samples of a partition in chunks, each as soon as its responses are complete.

    `readers` are the ranks that work chunk by chunk. They agree on the order of the chunks with the generating ranks.
    """

    partition: Partition
    parts: tuple[Partition, ...]
    fields: tuple[str, ...]
    readers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"split into {len(self.parts)} chunks"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.partition.layout.ranks, *self.readers}))

    def touches(self) -> Iterator[Touch]:
        for f in self.fields:
            yield from ((p, f) for p in (self.partition, *self.parts))


@dataclass(frozen=True)
class Merge:
    """Joins the chunks of a partition; of their `fields`, the step keeps the ones in `kept`."""

    parts: tuple[Partition, ...]
    partition: Partition
    fields: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"merge {len(self.parts)} chunks"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.partition.layout.ranks

    def touches(self) -> Iterator[Touch]:
        yield from ((p, f) for f in self.fields for p in self.parts)
        yield from ((self.partition, f) for f in self.kept)

    def consumed(self) -> set[tuple[str, str]]:
        """Returns the (partition, field) pairs that no longer exist after this task."""
        return {(p.id, f) for p in self.parts for f in self.fields}


Task = Load | Move | RunNode | SyncWeights | Resample | Split | Merge | Free


def chunk_of(t: Task) -> int | None:
    """Returns the chunk of a task; None: the whole step."""
    part = t.dst if isinstance(t, Move) else t.partition if isinstance(t, RunNode | Free) else None
    return part.chunk[0] if part and part.chunk else None


@dataclass(frozen=True)
class Edge:
    """The fields that one node writes and another reads; `moves` if the two are in different partitions."""

    writer: str
    reader: str
    fields: tuple[str, ...]
    moves: bool
    expected_bytes: int  # of all samples of a step; a move may send less, or more if there are replicas


@dataclass(frozen=True)
class Plan:
    """The plan of a step, the same on every rank: `tasks` in global order, `chain(rank)` the tasks of one rank."""

    flow: Flow
    workers: int
    rank_sets: Mapping[str, tuple[int, ...]]
    samples: int
    repeat: int
    bytes: Mapping[str, int]  # field → expected bytes per sample
    partitions: tuple[Partition, ...]
    home: Mapping[str, str]  # node → partition
    tasks: tuple[Task, ...]
    prompts_ahead: int = 0  # of later steps, which may be begun early

    @cached_property
    def staleness(self) -> int:
        """The steps by which rollout weights are behind: the delay of the loop-carried edge."""
        return max((t.delay for t in self.tasks if isinstance(t, SyncWeights)), default=0)

    @cached_property
    def ahead(self) -> frozenset[int]:
        """The generating ranks, if they may run `staleness` steps ahead of the others."""
        nodes = [n for n in self.flow.nodes if n.generates and self.staleness]
        return frozenset(r for n in nodes for r in self.partition_of(n.id).layout.ranks)

    @cached_property
    def chunks(self) -> int:
        """The number of parts in which generating ranks send the samples of a step."""
        return next((len(t.parts) for t in self.tasks if isinstance(t, Split)), 1)

    @property
    def overlaps(self) -> bool:
        """Returns whether generating ranks go on while their samples are sent."""
        return self.staleness > 0 or self.chunks > 1

    def _repr_html_(self) -> str:
        from distflow.plan.table import html

        return html(self)

    def chain(self, rank: int) -> tuple[Task, ...]:
        return tuple(t for t in self.tasks if rank in _as_set(t.ranks))

    def partition_of(self, node_id: str) -> Partition:
        return self._partition[self.home[node_id]]

    @cached_property
    def _partition(self) -> dict[str, Partition]:
        return {p.id: p for p in self.partitions}

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(t for t in self.tasks if isinstance(t, Move))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        fields: dict[tuple[str, str], list[str]] = {}
        for n in self.flow.order:
            for f in n.reads:
                fields.setdefault((self.flow.writer[f], n.id), []).append(f)
        carried = {(src.id, dst.id) for t in self.tasks if isinstance(t, Resample) for src, dst, _ in t.carried}
        local, home = {(p.id, p.id) for p in self.partitions} | carried, self.home
        return tuple(
            Edge(w, r, tuple(fs), (home[w], home[r]) not in local, self.samples * sum(self.bytes[f] for f in fs))
            for (w, r), fs in fields.items()
        )

    def chains(self) -> dict[tuple[int, ...], tuple[Task, ...]]:
        """Returns ranks with equal chains → their chain."""
        by_chain: dict[tuple[int, ...], list[int]] = {}
        sets = [_as_set(t.ranks) for t in self.tasks]
        for rank in range(self.workers):
            by_chain.setdefault(tuple(i for i, s in enumerate(sets) if rank in s), []).append(rank)
        return {tuple(ranks): tuple(self.tasks[i] for i in chain) for chain, ranks in by_chain.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "flow": self.flow.name,
            "workers": self.workers,
            "samples": self.samples,
            "samples_per_prompt": self.repeat,
            "staleness": self.staleness,
            "prompts_ahead": self.prompts_ahead,
            "rank_sets": {name: format_ranks(ranks) for name, ranks in self.rank_sets.items()},
            "partitions": [
                {
                    "id": p.id,
                    "ranks": format_ranks(p.layout.ranks),
                    "dp": p.layout.dp,
                    **({"sp": p.layout.sp} if p.layout.sp > 1 else {}),
                    "tp": p.layout.tp,
                    "whole_groups": p.whole_groups,
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
        text = json.dumps(_without_estimates(self.to_json()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _without_estimates(value: Any) -> Any:
    """Returns the plan without expected bytes, which depend on the files of a host."""
    if isinstance(value, dict):
        return {k: _without_estimates(v) for k, v in value.items() if k != "expected_bytes"}
    return [_without_estimates(v) for v in value] if isinstance(value, list) else value


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
                "assigns": t.assigns,
                "expected_bytes": t.expected_bytes,
            }
        case RunNode():
            return {"do": "run", "node": t.node, "partition": t.partition.id}
        case SyncWeights():
            ends = {name: str(layout) for name, layout in (("from", t.source), ("to", t.target)) if layout}
            task = {"do": "weights", "role": t.role, "ranks": format_ranks(t.ranks)}
            delay = {"delay": t.delay} if t.delay else {}
            return task | ends | {"expected_bytes": t.expected_bytes} | delay
        case Resample():
            return {"do": "resample", "keep": t.field, "rounds": t.rounds, "unit": t.unit}
        case Split():
            return {"do": "split", "partition": t.partition.id, "chunks": len(t.parts), "fields": list(t.fields)}
        case Merge():
            return {"do": "merge", "partition": t.partition.id, "chunks": len(t.parts), "fields": list(t.kept)}
        case Free():
            return {"do": "free", "partition": t.partition.id, "fields": list(t.fields)}


@cache
def _as_set(ranks: tuple[int, ...]) -> frozenset[int]:
    """Returns a set for membership tests; a plan has only a few different tuples of ranks, each tested many times."""
    return frozenset(ranks)
