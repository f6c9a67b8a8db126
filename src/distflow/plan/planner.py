"""`plan(flow, placement, workload) -> Plan`: one chain of tasks per rank. Pure, deterministic, no torch.

Every rank derives the same global order of tasks and runs the subsequence it takes part in. A task that involves
several ranks stands at the same place in all their chains, which is why no exchange can deadlock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from distflow.errors import PlacementError
from distflow.flow.graph import SOURCE, Flow, Node
from distflow.plan.layout import Layout
from distflow.plan.placement import Placement
from distflow.plan.tasks import Free, Load, Move, Partition, Plan, Refill, Run, Task, Weights


@dataclass(frozen=True)
class Workload:
    """What one step handles: `prompts` × `repeat` samples; `bytes` are a field's expected bytes per sample."""

    prompts: int = 1
    repeat: int = 1
    bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.prompts * self.repeat

    def bytes_of(self, fields: tuple[str, ...]) -> int:
        return sum(self.bytes.get(f, 8) for f in fields)


def plan(
    flow: Flow, placement: Placement, workload: Workload, members: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Plan:
    """`members`: role → ranks that have its model though no node of this flow is there."""
    placement.check(flow)
    return _Planner(flow, placement, workload, members).plan()


class _Planner:
    """Walks the nodes in global order and keeps where every field has got to."""

    def __init__(
        self, flow: Flow, placement: Placement, workload: Workload, members: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.flow, self.placement, self.workload, self.members = flow, placement, workload, members
        self.partitions: list[Partition] = []
        self.home: dict[str, Partition] = {}  # node → the partition it runs in
        self.held: dict[str, list[Partition]] = {}  # field → the partitions that hold it, writer's first
        self.closed: set[str] = set()  # partitions of before a refill, in which nothing runs any more
        self.assigned: set[str] = set()  # partitions whose samples are already dealt out
        self.tasks: list[Task] = []

    def plan(self) -> Plan:
        source = self._new_partition(self.placement.source_layout(self.flow), whole=True, balance=None, where=SOURCE)
        self.assigned.add(source.id)
        self.home[SOURCE] = source
        for n in self.flow.order:  # partitions first: a move carries all that its target will ever read
            self.home[n.id] = self._choose_partition(n)
            if n.refill:
                self.closed = {p.id for p in self.partitions}
        self.tasks.append(Load(source, self._kept(self.flow.source)))
        self._hold(self.flow.source, source)
        for i, n in enumerate(self.flow.order):
            self._bring(n, self.flow.order[i:])
            if n.hand_over:
                own = (r for m in self.flow.nodes if m.role == n.role and m.method for r in self._layout(m).ranks)
                self.tasks.append(Weights(n.role, tuple(sorted({*own, *self.members.get(n.role, ())}))))
            kept = n.writes if n.refill else self._kept(n.writes)
            self.tasks.append(Run(n.id, self.home[n.id], n.reads, kept))
            self._hold(n.writes, self.home[n.id])
            if n.refill:
                self._refill(n, self.flow.order[i + 1 :])
        return Plan(
            flow=self.flow,
            workers=self.placement.workers,
            groups=self.placement.ranks,
            samples=self.workload.samples,
            repeat=self.workload.repeat,
            bytes={f: self.workload.bytes_of((f,)) for f in self.flow.writer},
            partitions=tuple(self.partitions),
            home={k: p.id for k, p in self.home.items()},
            tasks=_with_frees(self.tasks),
        )

    def _refill(self, n: Node, later: tuple[Node, ...]) -> None:
        """From here on every field that is still read is where it was written, in uneven shares."""
        wanted = {f for m in later for f in m.reads}
        places: dict[Partition, list[str]] = {}
        for f, held in self.held.items():
            if f in wanted:
                places.setdefault(held[0], []).append(f)
        carried = [
            (p, Partition(f"{p.id}+", p.layout, p.whole, None, uneven=True), tuple(fields))
            for p, fields in places.items()
        ]
        repeat = self.workload.repeat
        section = [p for p in self.partitions if p.id in self.closed]
        unit = math.lcm(*(p.layout.dp if p.whole else p.layout.dp // math.gcd(p.layout.dp, repeat) for p in section))
        everybody = tuple(range(self.placement.workers))
        self.tasks.append(Refill(n.id, self.home[n.id], n.writes[0], n.refill, unit, tuple(carried), everybody))
        self.held = {f: [dst] for _, dst, fields in carried for f in fields}
        self.partitions += [dst for _, dst, _ in carried]

    def _kept(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Fields that somebody reads; the others are dropped where they are written."""
        return tuple(f for f in fields if self.flow.readers[f])

    def _hold(self, fields: tuple[str, ...], partition: Partition) -> None:
        for f in self._kept(fields):
            self.held.setdefault(f, []).append(partition)

    def _choose_partition(self, n: Node) -> Partition:
        """Stay in the partition of an input where layout and wishes allow it; else share one with a like node."""
        layout = self._layout(n)
        if n.balance is None:
            weight: dict[str, int] = {}
            inputs: dict[str, Partition] = {}
            for f in n.reads:
                p = self.home[self.flow.writer[f]]
                inputs[p.id] = p
                weight[p.id] = weight.get(p.id, 0) + self.workload.bytes_of((f,))
            nearest = sorted(inputs.values(), key=lambda p: -weight[p.id])
            others = [p for p in reversed(self.partitions) if p.balance is None]
            for p in (*nearest, *others):
                if p.id not in self.closed and p.layout == layout and (p.whole or not n.whole_groups):
                    return p
        else:
            for p in self.partitions:
                fits = p.layout == layout and p.balance == n.balance
                if fits and p.id not in self.closed and (p.whole or not n.whole_groups):
                    return p
        # If a later node of the same layout wants whole groups, deal whole groups now and spare it a move.
        whole = n.whole_groups or (
            self.workload.prompts % layout.dp == 0
            and any(m.whole_groups and m.balance == n.balance and self._layout(m) == layout for m in self.flow.nodes)
        )
        return self._new_partition(layout, whole, n.balance, n.id)

    def _layout(self, n: Node) -> Layout:
        layout = self.placement.layout(n.id, n.role)
        return Layout(layout.ranks, 1, len(layout.ranks)) if n.whole_batch else layout

    def _new_partition(self, layout: Layout, whole: bool, balance: str | None, where: str) -> Partition:
        units = self.workload.prompts if whole else self.workload.samples
        if units % layout.dp:
            step = layout.dp if whole else layout.dp // math.gcd(layout.dp, self.workload.repeat)
            low = self.workload.prompts // step * step
            fit = " or ".join(str(x) for x in (low, low + step) if x)
            what = "prompts" if whole else "samples"
            raise PlacementError(
                f"node '{where}': the {units} {what} of a step do not divide over its {layout.dp} data-parallel cells;"
                f" use a batch of {fit} prompts, or another layout"
            )
        made = Partition(f"p{len(self.partitions)}", layout, whole, balance)
        self.partitions.append(made)
        return made

    def _bring(self, n: Node, later: tuple[Node, ...]) -> None:
        """Bring what n reads to its partition, along with what later nodes there will read of the same places."""
        target = self.home[n.id]
        missing = [f for f in n.reads if target not in self.held[f]]
        if not missing:
            self.assigned.add(target.id)  # a node that reads nothing works on a plain contiguous deal
            return
        origin = {f: self._nearest(f, target) for f in missing}
        for other in later:
            for f in other.reads if self.home[other.id] is target else ():
                # Not what a parallel branch writes: n would wait for it.
                if (
                    f in self.held
                    and target not in self.held[f]
                    and self._depth(self.flow.writer[f]) < self._depth(n.id)
                ):
                    place = self._nearest(f, target)
                    if place in origin.values():
                        origin.setdefault(f, place)
        sources = list(dict.fromkeys(origin.values()))
        if target.balance and (informed := origin.get(target.balance)):
            # The first move into a partition deals its samples, so it must be the one that knows the lengths.
            sources.sort(key=lambda p: p is not informed)
        for src in sources:
            fields = tuple(f for f, p in origin.items() if p is src)
            deals = target.id not in self.assigned
            self.assigned.add(target.id)
            moved = _expected_bytes(src.layout, target.layout, deals and target.balance is None, self.workload, fields)
            number = sum(isinstance(t, Move) for t in self.tasks)
            self.tasks.append(Move(f"m{number}", src, target, fields, deals, moved))
            self._hold(fields, target)

    def _depth(self, node_id: str) -> int:
        return -1 if node_id == SOURCE else self.flow.depth[node_id]

    def _nearest(self, f: str, target: Partition) -> Partition:
        """Of the places that hold a field, the one that shares most ranks with the target; the writer's on a tie."""
        want = set(target.layout.ranks)
        return max(self.held[f], key=lambda p: len(want.intersection(p.layout.ranks)))


def _expected_bytes(src: Layout, dst: Layout, local_first: bool, work: Workload, fields: tuple[str, ...]) -> int:
    """Bytes over the wire if all samples were equal: what a receiving rank needs less what it may keep."""
    need = work.samples / dst.dp
    overlap = [len({dst.cell_of(r) for r in cell} - {None}) for cell in src.cells]
    total = 0.0
    for r in dst.ranks:
        s = src.cell_of(r)
        if s is None:
            kept = 0.0
        elif local_first:
            kept = min(need, work.samples / src.dp / overlap[s])
        else:
            kept = need / src.dp
        total += need - kept
    return round(total * work.bytes_of(fields))


def _with_frees(tasks: list[Task]) -> tuple[Task, ...]:
    """After each task, free what no later task of that partition reads."""
    last: dict[tuple[str, str], int] = {}
    places: dict[str, Partition] = {}
    for i, t in enumerate(tasks):
        for p, f in t.touches():
            last[p.id, f] = i
            places[p.id] = p
    out: list[Task] = []
    for i, t in enumerate(tasks):
        out.append(t)
        dead: dict[str, list[str]] = {}
        for p, f in dict.fromkeys(t.touches()):
            if last[p.id, f] == i and not (isinstance(t, Refill) and (p.id, f) in t.taken()):
                dead.setdefault(p.id, []).append(f)
        out += [Free(places[p], tuple(fields)) for p, fields in dead.items()]
    return tuple(out)
