"""`plan(flow, placement, workload) -> Plan`: one chain of tasks per rank. Pure, deterministic, no torch.

Every rank derives the same global order of tasks and runs its own in that order. A task of several ranks is at the same
place in all their chains, so no exchange can deadlock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.chunks import in_chunks
from distflow.plan.layout import Layout, contiguous_share
from distflow.plan.placement import Placement
from distflow.plan.staleness import check_apart, check_partial
from distflow.plan.tasks import Free, Load, Merge, Move, Partition, Plan, Resample, RunNode, SyncWeights, Task


@dataclass(frozen=True)
class Workload:
    """The size of a step: `prompts` × `repeat` samples; expected `bytes` of a field per sample, `weights` of a role."""

    prompts: int = 1
    repeat: int = 1
    bytes: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.prompts * self.repeat

    def bytes_of(self, fields: tuple[str, ...]) -> int:
        return sum(self.bytes.get(f, 8) for f in fields)


def plan(
    flow: Flow,
    placement: Placement,
    workload: Workload,
    model_ranks: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    staleness: int = 0,
    chunk: int | None = None,
    prompts_ahead: int = 0,
) -> Plan:
    """Plans a step. `model_ranks`: role → further ranks that hold its model, without a node of this flow.

    With `staleness` d, a step generates with the weights of d steps before. With `chunk`, generating ranks send samples
    in parts of this many prompts. With `prompts_ahead`, they may begin this many prompts of later steps.
    """
    placement.check(flow)
    if prompts_ahead:
        check_partial(flow, placement, staleness)
    if staleness:
        check_apart(flow, placement, "rollout.staleness")
    if chunk:
        check_apart(flow, placement, "rollout.chunk")
    result = _Planner(flow, placement, workload, model_ranks, staleness, chunk).plan()
    return replace(result, prompts_ahead=prompts_ahead)


class _Planner:
    """Walks the nodes in global order and tracks which partitions hold each field."""

    def __init__(
        self,
        flow: Flow,
        placement: Placement,
        workload: Workload,
        model_ranks: Mapping[str, tuple[int, ...]],
        staleness: int,
        chunk: int | None,
    ) -> None:
        self.flow, self.placement, self.workload, self.model_ranks = flow, placement, workload, model_ranks
        self.staleness, self.chunk = staleness, chunk
        self.partitions: list[Partition] = []
        self.home: dict[str, Partition] = {}  # node → the partition it runs in
        self.held: dict[str, list[Partition]] = {}  # field → the partitions that hold it, its writer's first
        self.closed: set[str] = set()  # partitions from before a resample; no later node may run there
        self.resampled: dict[str, Partition] = {}  # id of a closed partition → the one after the resample
        self.assigned: set[str] = set()  # partitions whose samples are already assigned to replicas
        self.tasks: list[Task] = []

    def plan(self) -> Plan:
        source = self._new_partition(self.placement.source_layout(self.flow), True, balance=None)
        self.assigned.add(source.id)
        self.home[SOURCE] = source
        for n in self.flow.order:  # all partitions first: a move also brings the inputs of later nodes there
            self.home[n.id] = self._choose_partition(n)
            if n.dynamic_sampling:
                self.closed = {p.id for p in self.partitions}
                self.resampled = {p.id: _resampled(p) for p in self.partitions}
                # Only nodes of a single replica have the samples that later nodes want, and as many.
                self.partitions += [p for p in self.resampled.values() if not p.uneven]
        self.tasks.append(Load(source, self._with_readers(self.flow.source)))
        self._hold(self.flow.source, source)
        for i, n in enumerate(self.flow.order):
            self._move_inputs(n, self.flow.order[i:])
            if n.generates:
                self.tasks.append(self._sync_weights(n))
            writes = n.writes if n.dynamic_sampling else self._with_readers(n.writes)
            self.tasks.append(RunNode(n.id, self.home[n.id], n.reads, writes))
            self._hold(n.writes, self.home[n.id])
            if n.dynamic_sampling:
                self._resample(n, self.flow.order[i + 1 :])
        tasks = self.tasks
        if self.chunk:
            tasks = in_chunks(tasks, self.flow, self.home, self.chunk, self.workload.prompts, self.workload.repeat)
        return Plan(
            flow=self.flow,
            workers=self.placement.workers,
            rank_sets=self.placement.ranks,
            samples=self.workload.samples,
            repeat=self.workload.repeat,
            bytes={f: self.workload.bytes_of((f,)) for f in self.flow.writer},
            partitions=tuple({p.id: p for p in (*self.partitions, *_partitions(tasks))}.values()),
            home={k: p.id for k, p in self.home.items()},
            tasks=_with_frees(tasks),
        )

    def _sync_weights(self, n: Node) -> SyncWeights:
        own = (r for m in self.flow.nodes if m.role == n.role and m.method for r in self._layout(m).ranks)
        trained = (self._layout(m) for m in self.flow.nodes if m.role == n.role and m.type == "train")
        source, target, size = next(trained, None), self._layout(n), self.workload.weights.get(n.role)
        ranks = tuple(sorted({*own, *self.model_ranks.get(n.role, ())}))
        expected = None if size is None else _weight_bytes(size, source, target)
        return SyncWeights(n.role, ranks, source, target, expected, self.staleness)

    def _resample(self, n: Node, later: tuple[Node, ...]) -> None:
        """Adds the resample: every field that is still read stays where it was written, in uneven shares."""
        needed = {f for m in later for f in m.reads}
        fields_of: dict[Partition, list[str]] = {}
        for f, held in self.held.items():
            if f in needed:
                fields_of.setdefault(held[0], []).append(f)
        carried = [(p, self.resampled[p.id], tuple(fields)) for p, fields in fields_of.items()]
        unit = math.lcm(*(self._unit(p.layout, p.whole_groups) for p in self.partitions if p.id in self.closed))
        all_ranks = tuple(range(self.placement.workers))
        self.tasks.append(
            Resample(n.id, self.home[n.id], n.writes[0], n.dynamic_sampling, unit, tuple(carried), all_ranks)
        )
        self.held = {f: [dst] for _, dst, fields in carried for f in fields}
        self.partitions += [dst for _, dst, _ in carried if dst.uneven]
        self.assigned.update(dst.id for _, dst, _ in carried)

    def _with_readers(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the fields with a reader; the others are dropped where they are written."""
        return tuple(f for f in fields if self.flow.readers[f])

    def _hold(self, fields: tuple[str, ...], partition: Partition) -> None:
        for f in self._with_readers(fields):
            self.held.setdefault(f, []).append(partition)

    def _choose_partition(self, n: Node) -> Partition:
        """Returns the partition of an input if layout and requirements allow, else one that fits, else a new one."""
        layout = self._layout(n)
        several = layout.dp > 1  # a single replica has all samples: nothing to balance, and every group is whole
        balance = n.balance if several else None
        if balance is None:
            weight: dict[str, int] = {}
            inputs: dict[str, Partition] = {}
            for f in n.reads:
                p = self.home[self.flow.writer[f]]
                inputs[p.id] = p
                weight[p.id] = weight.get(p.id, 0) + self.workload.bytes_of((f,))
            heaviest = sorted(inputs.values(), key=lambda p: -weight[p.id])
            others = [p for p in reversed(self.partitions) if p.balance is None]
            candidates = [*heaviest, *others]
        else:
            candidates = [p for p in self.partitions if p.balance == balance]
        even = self._groups_divide_evenly(layout)
        for p in candidates:
            if p.id in self.closed or p.layout != layout or (several and n.whole_groups and not p.whole_groups):
                continue
            # A model does not run on whole groups if that left some workers with fewer samples than necessary.
            if n.whole_groups or not p.whole_groups or even or n.type == "compute":
                return p
        # If a later node of the same layout needs whole groups, keep them together now and spare it a move.
        whole_groups = n.whole_groups or (
            even
            and any(m.whole_groups and m.balance == n.balance and self._layout(m) == layout for m in self.flow.nodes)
        )
        return self._new_partition(layout, whole_groups, balance)

    def _groups_divide_evenly(self, layout: Layout) -> bool:
        """Returns whether the largest replica has no more samples with whole groups than without."""
        prompts, repeat = self.workload.prompts, self.workload.repeat
        return -(-prompts // layout.dp) * repeat == -(-prompts * repeat // layout.dp)

    def _layout(self, n: Node) -> Layout:
        layout = self.placement.layout(n)
        return Layout(layout.ranks, 1, len(layout.ranks)) if n.whole_batch else layout

    def _new_partition(self, layout: Layout, whole_groups: bool, balance: str | None) -> Partition:
        partition = Partition(f"p{len(self.partitions)}", layout, whole_groups, balance)
        self.partitions.append(partition)
        return partition

    def _unit(self, layout: Layout, whole_groups: bool) -> int:
        """Returns the smallest number of prompts that divides evenly over the layout."""
        return layout.dp if whole_groups else layout.dp // math.gcd(layout.dp, self.workload.repeat)

    def _move_inputs(self, n: Node, later: tuple[Node, ...]) -> None:
        """Moves the inputs of n to its partition, and the inputs of later nodes there from the same partitions."""
        target = self.home[n.id]
        missing = [f for f in n.reads if target not in self.held[f]]
        if not missing:
            self.assigned.add(target.id)  # a node that reads nothing has contiguous shares of the samples
            return
        origin = {f: self._nearest(f, target) for f in missing}
        for other in later:
            for f in other.reads if self.home[other.id] is target else ():
                # Without outputs of a parallel branch, for which n would wait.
                if (
                    f in self.held
                    and target not in self.held[f]
                    and self._depth(self.flow.writer[f]) < self._depth(n.id)
                ):
                    holder = self._nearest(f, target)
                    if holder in origin.values():
                        origin.setdefault(f, holder)
        sources = list(dict.fromkeys(origin.values()))
        if target.balance and (with_lengths := origin.get(target.balance)):
            # The first move into a partition assigns its samples, so it must know the lengths.
            sources.sort(key=lambda p: p is not with_lengths)
        for src in sources:
            fields = tuple(f for f, p in origin.items() if p is src)
            assigns = target.id not in self.assigned
            self.assigned.add(target.id)
            local_first = assigns and target.balance is None
            expected = _expected_bytes(src, target, local_first, self.workload, fields)
            number = sum(isinstance(t, Move) for t in self.tasks)
            self.tasks.append(Move(f"m{number}", src, target, fields, assigns, expected))
            self._hold(fields, target)

    def _depth(self, node_id: str) -> int:
        return -1 if node_id == SOURCE else self.flow.depth[node_id]

    def _nearest(self, f: str, target: Partition) -> Partition:
        """Returns the partition with a field that shares most ranks with the target; on a tie, the writer's."""
        ranks = set(target.layout.ranks)
        return max(self.held[f], key=lambda p: len(ranks.intersection(p.layout.ranks)))


def _resampled(p: Partition) -> Partition:
    return Partition(f"{p.id}+", p.layout, p.whole_groups, None, uneven=p.layout.dp > 1)


def _expected_bytes(src: Partition, dst: Partition, local_first: bool, work: Workload, fields: tuple[str, ...]) -> int:
    """Returns the bytes sent if all samples had equal size: the need of each receiving rank less its own samples."""
    held, needed = _replica_sizes(src, work), _replica_sizes(dst, work)
    targets = [1] * src.layout.dp  # the replicas of `dst` that share ranks with each replica of `src`
    if src.layout.replica_size > 1 and local_first:
        targets = [len({dst.layout.replica_of(r) for r in replica} - {None}) for replica in src.layout.replicas]
    total = float(sum(needed) * dst.layout.replica_size)
    for i, r in enumerate(dst.layout.ranks):
        s = src.layout.replica_of(r)
        if s is not None:
            need = needed[i // dst.layout.replica_size]
            total -= min(need, held[s] / targets[s]) if local_first else need * held[s] / work.samples
    return round(total * work.bytes_of(fields))


def _weight_bytes(size: int, source: Layout | None, target: Layout) -> int:
    """Returns the bytes that generating ranks need of a model, less their own shards."""
    if source is None:
        return 0
    held = size / len(source.ranks)  # a rank's shard, if parameters are sharded over all of dp
    return round(sum(size / target.tp - (held if source.replica_of(r) is not None else 0) for r in target.ranks))


def _replica_sizes(partition: Partition, work: Workload) -> list[int]:
    """Returns the number of samples of each replica with contiguous shares."""
    units, size = (work.prompts, work.repeat) if partition.whole_groups else (work.samples, 1)
    replicas = partition.layout.dp
    if units % replicas == 0:
        return [units // replicas * size] * replicas
    return [(last - first) * size for first, last in (contiguous_share(units, replicas, d) for d in range(replicas))]


def _partitions(tasks: list[Task]) -> list[Partition]:
    return [p for t in tasks for p, _ in t.touches()]


def _with_frees(tasks: list[Task]) -> tuple[Task, ...]:
    """Inserts after each task a `Free` of the fields that no later task of that partition reads."""
    last: dict[tuple[str, str], int] = {}
    partitions: dict[str, Partition] = {}
    for i, t in enumerate(tasks):
        for p, f in t.touches():
            last[p.id, f] = i
            partitions[p.id] = p
    out: list[Task] = []
    for i, t in enumerate(tasks):
        out.append(t)
        dead: dict[str, list[str]] = {}
        for p, f in dict.fromkeys(t.touches()):
            if last[p.id, f] == i and not (isinstance(t, Resample | Merge) and (p.id, f) in t.consumed()):
                dead.setdefault(p.id, []).append(f)
        out += [Free(partitions[p], tuple(fields)) for p, fields in dead.items()]
    return tuple(out)
