"""The Data Coordinator of one worker: loads, keeps, moves and frees the fields of its chain. No shared actor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch

from distflow.batch.batch import (
    NO_SAMPLES,
    Batch,
    Column,
    Ragged,
    as_column,
    concat,
    copy_objects,
    floats_as_tensor,
    nbytes,
    select,
)
from distflow.comm.allocator import CachingAllocator
from distflow.comm.collectives import Communication, all_gather
from distflow.comm.domains import Domains, contiguous_assignment
from distflow.comm.exchange import Assignment, exchange
from distflow.coordinator.buffer import Buffer, Key
from distflow.coordinator.dynamic_sampling import DynamicSampling, SampledPrompts
from distflow.dataset.loader import Loader
from distflow.errors import DataError, cut, suggest
from distflow.flow.graph import SOURCE
from distflow.plan.layout import contiguous_share
from distflow.plan.tasks import Free, Load, Merge, Move, Partition, Plan, Resample, RunNode, Split
from distflow.plan.topology import Topology
from distflow.util.arrays import Ints


@dataclass
class StepTraffic:
    """The bytes one worker sent, received and read locally in a step; `imbalance` is (max − min) / mean tokens."""

    sent: int = 0
    received: int = 0
    local: int = 0
    imbalance: float | None = None


class _StepState:
    """The samples of one step, as this rank knows them. Moves may be carried out in a thread of their own."""

    def __init__(self) -> None:
        self.slots: dict[str, Ints] = {}  # partition → the slots this rank has there
        self.assignments: dict[tuple[str, int], Ints] = {}  # (partition, samples) of a domain → replica of each slot
        self.traffic = StepTraffic()  # of moves
        self.local = 0  # bytes that nodes read where others wrote them
        self.sampling: DynamicSampling | None = None  # while rounds of dynamic sampling are running
        self.sampled: SampledPrompts | None = None  # the prompts of the step, once they are chosen
        self.rounds: dict[str, list[tuple[Ints, dict[str, Column]]]] = {}  # partition → ids and columns of each round


class Coordinator:
    """Carries out the data tasks of one rank. Errors name the field; the worker adds node, step and rank.

    Steps count from 1, as everywhere but in the loader, whose stream starts with 0.
    """

    def __init__(self, rank: int, plan: Plan, loader: Loader, topology: Topology | None = None) -> None:
        self.rank, self.plan, self.loader, self.topology = rank, plan, loader, topology
        self.buffer = Buffer()
        # Fields that refer to more than they hold → is told what was freed, and what is left of such fields.
        self.on_free: dict[str, Callable[[Column, list[Column]], None]] = {}
        self.allocator = CachingAllocator()
        self._steps: dict[int, _StepState] = {}  # steps that are not over
        self._domains: dict[int, Domains] = {}  # by the number of samples
        self._moved: set[Key] = set()  # columns received by a move, not written by a node of this rank
        self.position = 0  # of the next step's first prompt in the loader's stream, if the plan has a resample
        self._positions: dict[int, int] = {}  # step → what `position` was after it
        self._lock = Lock()
        self._loaded_ahead: dict[int, tuple[Ints, dict[str, list[Any]]]] = {}  # step → this replica's rows

    def load(self, step: int, task: Load) -> None:
        """Takes the rows that were prefetched during the last step, and starts to prefetch the next step's."""
        layout = task.partition.layout
        replica = layout.replica_of(self.rank)
        assert replica is not None
        state = self._steps.get(step)
        if state and (sampling := state.sampling):
            ids, columns = self.loader.load_range(sampling.position, sampling.count, replica, layout.dp)
        else:
            ids, columns = self._load(step, replica, layout.dp)
            self._loaded_ahead.pop(step, None)
            if step + 1 not in self._loaded_ahead:
                self.loader.prefetch(step, replica, layout.dp)  # the next one
        self._state(step).slots[task.partition.id] = ids - self.groups(step)[0] * self.plan.repeat
        for f in task.fields:
            self.buffer.put(Key(step, task.partition.id, f), as_column(columns[f], len(ids), f"data column '{f}'"))

    def _load(self, step: int, replica: int, replicas: int) -> tuple[Ints, dict[str, list[Any]]]:
        return self._loaded_ahead[step] if step in self._loaded_ahead else self.loader.load(step - 1, replica, replicas)

    def share_ahead(self, task: RunNode) -> int:
        """Returns this replica's share of the plan's prompts ahead."""
        replica = task.partition.layout.replica_of(self.rank)
        assert replica is not None
        begin, end = contiguous_share(self.plan.prompts_ahead, task.partition.layout.dp, replica)
        return end - begin

    def ahead(self, step: int, task: RunNode, last: int, prompts: int) -> Batch:
        """Returns the samples of this replica's first so many prompts after those of a step.

        `last`: the step after which there are no samples.
        """
        layout, repeat = task.partition.layout, self.plan.repeat
        replica = layout.replica_of(self.rank)
        assert replica is not None
        ids: Ints = np.empty(0, np.int64)
        columns: dict[str, list[Any]] = {f: [] for f in task.reads}
        for later in range(step + 1, last + 1):
            if len(ids) >= prompts * repeat:
                break
            more, rows = self._load(later, replica, layout.dp)
            if not len(more):  # this replica has no prompts in any step
                break
            self._loaded_ahead[later] = more, rows
            ids = np.concatenate([ids, more])
            columns = {f: [*column, *rows[f]] for f, column in columns.items()}
        ids = ids[: prompts * repeat]
        return Batch(ids, ids // repeat, {f: copy_objects(column[: len(ids)]) for f, column in columns.items()})

    def move(self, step: int, task: Move) -> Communication[None]:
        """Moves fields from one partition to another."""
        columns = yield from self.exchange(step, task, self.outgoing(step, task))
        self.receive(step, task, columns)

    def outgoing(self, step: int, task: Move) -> dict[str, Column] | None:
        """Returns the columns that this rank has in the source of a move, None if it is not in it."""
        if task.src.layout.replica_of(self.rank) is None:
            return None
        return {f: self.buffer.get(Key(step, task.src.id, f)) for f in task.fields}

    def receive(self, step: int, task: Move, columns: Mapping[str, Column] | None) -> None:
        """Keeps the columns of a move, if this rank is in its target."""
        for f, column in (columns or {}).items():
            self.buffer.put(Key(step, task.dst.id, f), column)
            self._moved.add(Key(step, task.dst.id, f))

    def exchange(
        self, step: int, task: Move, columns: Mapping[str, Column] | None
    ) -> Communication[dict[str, Column] | None]:
        """Sends `columns`, those of `outgoing`; returns the columns for `receive`. Moves of a step are in order."""
        state, span = self._state(step), self._span(step, task.src)
        samples = len(span)
        if samples not in self._domains:
            self._domains[samples] = Domains(self.plan, samples)
        domain = self._domains[samples].of(task, self.rank)
        src, dst = domain.move.src, domain.move.dst

        def within(partition: Partition) -> Ints:  # the slots of this rank, counted within the domain
            return np.searchsorted(span, self.slots(step, partition)) - domain.first

        held = None if columns is None else (within(task.src), columns)
        wanted = None
        if not task.assigns and dst.layout.replica_of(self.rank) is not None:
            wanted = within(task.dst)
        assignment = None
        if domain.known:
            assignment = Assignment(*(self._assignment(step, p, domain.samples) for p in (src, dst)))
        moved = yield from exchange(
            self.rank,
            domain.move,
            domain.samples,
            self.plan.repeat,
            held,
            wanted,
            self.allocator,
            self.topology,
            assignment,
        )
        state.assignments[src.id, domain.samples] = moved.assignment.old
        state.assignments[dst.id, domain.samples] = moved.assignment.new
        state.traffic.sent += moved.sent
        state.traffic.received += moved.received
        state.traffic.local += moved.kept
        if moved.imbalance is not None and dst.chunk is None:
            state.traffic.imbalance = max(moved.imbalance, state.traffic.imbalance or 0.0)
        if dst.layout.replica_of(self.rank) is None:
            return None
        state.slots[dst.id] = span[moved.slots + domain.first]
        return {f: moved.columns.get(f, NO_SAMPLES) for f in task.fields}

    def _span(self, step: int, partition: Partition) -> Ints:
        """Returns the slots of all ranks' samples in a partition, ascending: those of a chunk, or of the whole step."""
        slots = np.arange(len(self.groups(step)) * self.plan.repeat, dtype=np.int64)
        if partition.chunk is None:
            return slots
        i, count = partition.chunk
        replicas = self.plan.partition_of(SOURCE).layout.dp  # a chunk is an equal part of each of them
        return slots.reshape(replicas, count, -1)[:, i].reshape(-1)

    def put_chunk(self, step: int, task: Split, part: Partition, columns: Mapping[str, Column]) -> None:
        """Keeps a chunk that may be sent: its fields are `columns`, and what else of it this rank has."""
        own, i = self.slots(step, task.partition), part.chunk[0] if part.chunk else 0
        size = len(own) // len(task.parts)
        index = np.arange(i * size, (i + 1) * size)
        self._state(step).slots[part.id] = own[index]
        for f in task.fields:
            if f in columns:
                column = as_column(columns[f], size, f"field '{f}'")
            else:
                column = select(self.buffer.get(Key(step, task.partition.id, f)), index)
            self.buffer.put(Key(step, part.id, f), column)

    def merge(self, step: int, task: Merge) -> None:
        """Joins the chunks of a partition, in the order of their samples."""
        order = np.argsort(np.concatenate([self.slots(step, p) for p in task.parts]))
        for f in task.fields:
            columns = [self.buffer.pop(Key(step, p.id, f)) for p in task.parts]
            if f in task.kept:
                self.buffer.put(Key(step, task.partition.id, f), select(concat(columns), order))
                self._moved.add(Key(step, task.partition.id, f))
        self._moved.difference_update([Key(step, p.id, f) for p in task.parts for f in task.fields])

    def _assignment(self, step: int, partition: Partition, samples: int) -> Ints:
        """Returns the replica of each slot of this rank's domain in a partition, as an earlier move has told it."""
        assignment = self._state(step).assignments.get((partition.id, samples))
        return contiguous_assignment(partition, samples, self.plan.repeat) if assignment is None else assignment

    def inputs(self, step: int, task: RunNode) -> Batch:
        """Returns the inputs of a node. Tensors are shared with other readers and read-only; objects are copies."""
        groups, member = np.divmod(self.slots(step, task.partition), self.plan.repeat)
        ids = self.groups(step)[groups] * self.plan.repeat + member
        columns: dict[str, Column] = {}
        for f in task.reads:
            key = Key(step, task.partition.id, f)
            column = self.buffer.get(key)
            if key not in self._moved:
                self._state(step).local += nbytes(column)
            columns[f] = copy_objects(column) if isinstance(column, list) else column
        return Batch(ids, ids // self.plan.repeat, columns)

    def outputs(self, step: int, task: RunNode, value: Any) -> None:
        """Checks the outputs of a node, and keeps the fields that a later node reads."""
        node = self.plan.flow.node(task.node)
        samples = len(self.slots(step, task.partition))
        written = by_field(value, node.writes)
        for f in written:
            if f not in node.writes:
                raise DataError(f"returned field '{cut(str(f))}', which it does not declare{suggest(f, node.writes)}")
        for f in task.writes:
            if f not in written:
                readers = "', '".join(self.plan.flow.readers[f])
                raise DataError(f"returned no field '{f}', which '{readers}' reads")
            column = floats_as_tensor(as_column(written[f], samples, f"field '{f}'"))
            self.buffer.put(Key(step, task.partition.id, f), column)

    def free(self, step: int, task: Free) -> None:
        freed = {f: self.buffer.get(Key(step, task.partition.id, f)) for f in task.fields if f in self.on_free}
        self.buffer.free(step, task.partition.id, task.fields)
        for f, column in freed.items():
            self.on_free[f](column, [c for other in self.on_free for c in self.buffer.columns(other)])
        self._moved.difference_update([Key(step, task.partition.id, f) for f in task.fields])

    def _state(self, step: int) -> _StepState:
        return self._steps.get(step) or self._steps.setdefault(step, _StepState())  # one for all threads

    def check_freed(self, step: int) -> None:
        """Raises unless every field of a step was freed."""
        remaining = self.buffer.remaining(step)
        if remaining:
            raise DataError(f"step {step} is over, but these fields were never freed: {remaining}")

    def end_step(self, step: int) -> StepTraffic:
        """Forgets a step all of whose tasks are done, and returns its traffic."""
        state = self._steps.pop(step, None) or _StepState()
        # A checkpoint of a step may be written when later ones have ended here.
        oldest = step - self.plan.staleness - 1
        self._positions = {s: position for s, position in self._positions.items() if s >= oldest}
        state.traffic.local += state.local
        return state.traffic

    def slots(self, step: int, partition: Partition) -> Ints:
        """Returns the slots of this rank in a partition: contiguous shares, unless moves have assigned others."""
        slots = self._state(step).slots
        parts = [slots[i] for i in (f"{partition.id}#{i}" for i in range(self.plan.chunks)) if i in slots]
        if partition.id not in slots and partition.uneven and len(parts) == self.plan.chunks:
            slots[partition.id] = np.sort(np.concatenate(parts))
        if partition.id not in slots:
            replicas = contiguous_assignment(partition, len(self.groups(step)) * self.plan.repeat, self.plan.repeat)
            slots[partition.id] = np.flatnonzero(replicas == partition.layout.replica_of(self.rank))
        return slots[partition.id]

    def groups(self, step: int) -> Ints:
        """Returns the prompts of a step, ascending; during dynamic sampling, those of the current round."""
        state = self._steps.get(step)
        if state and state.sampled:
            return state.sampled.positions
        first, count = self.loader.position(step - 1), self.loader.prompts
        if state and state.sampling:
            first, count = state.sampling.position, state.sampling.count
        return np.arange(first, first + count, dtype=np.int64)

    def begin_sampling(self, step: int, task: Resample) -> None:
        """Starts the dynamic sampling of a step, before its first round, if the other thread has not."""
        state = self._state(step)
        with self._lock:
            if state.sampling is None and state.sampled is None:
                state.sampling = DynamicSampling(self.position, self.loader.prompts, task.rounds, task.unit)

    def sampled_prompts(self, step: int) -> SampledPrompts:
        """Returns the prompts of a step after its dynamic sampling."""
        sampled = self._state(step).sampled
        assert sampled is not None
        return sampled

    def position_after(self, step: int) -> int:
        """Returns where the step after `step` begins in the loader's stream: later ones may have been sampled."""
        return self._positions.get(step, self.position)

    def resample(self, step: int, task: Resample) -> Communication[bool]:
        """Keeps the useful samples of a round. Returns False if the step needs another round."""
        state = self._state(step)
        assert state.sampling is not None
        keep = yield from self._kept_prompts(step, task)
        prompts = self.groups(step)
        full = state.sampling.add_round(keep)
        for src, _, fields in task.carried:
            if src.layout.replica_of(self.rank) is not None:
                groups, member = np.divmod(self.slots(step, src), self.plan.repeat)
                columns = {f: self.buffer.pop(Key(step, src.id, f)) for f in fields}
                rounds = state.rounds.setdefault(src.id, [])
                rounds.append((prompts[groups] * self.plan.repeat + member, columns))
                selected = state.sampling.selected()
                state.rounds[src.id] = [_only_prompts(part, selected, self.plan.repeat) for part in rounds]
        self.buffer.discard(Key(step, task.partition.id, task.field))  # popped above if a later node reads it
        state.slots.clear()
        state.assignments.clear()
        self._moved.difference_update([key for key in list(self._moved) if key.step == step])  # a chain adds others
        if full:
            state.sampled = state.sampling.result()
            state.sampling = None
            self.position = self._positions[step] = state.sampled.next_position
            for src, dst, fields in task.carried:
                if src.layout.replica_of(self.rank) is not None:
                    self._merge_rounds(step, dst, fields, state.rounds.pop(src.id))
        return full

    def _kept_prompts(self, step: int, task: Resample) -> Communication[Any]:
        """Returns, for every prompt of the round, whether all of its samples are to be kept."""
        layout, samples = task.partition.layout, len(self.groups(step)) * self.plan.repeat
        share = task.partition.largest_share(samples, self.plan.repeat)
        flags = torch.full((share,), -1, dtype=torch.int32)  # 2 × slot + keep, or −1
        if layout.replica_of(self.rank) is not None:
            column = self.buffer.get(Key(step, task.partition.id, task.field))
            slots = torch.from_numpy(self.slots(step, task.partition))
            if len(slots):
                if isinstance(column, Ragged) or len(torch.as_tensor(column).shape) != 1:
                    raise DataError(f"node '{task.node}': field '{task.field}' must have one boolean per sample")
                flags[: len(slots)] = 2 * slots + torch.as_tensor(column).bool()
        gathered = (yield from all_gather(self.rank, task.ranks, flags)).flatten()
        known = gathered[gathered >= 0].numpy()
        keep = np.ones(samples, bool)
        keep[known // 2] = known % 2
        return keep.reshape(-1, self.plan.repeat).all(1)

    def _merge_rounds(
        self, step: int, into: Partition, fields: tuple[str, ...], rounds: list[tuple[Ints, dict[str, Column]]]
    ) -> None:
        """Puts the samples of all rounds into the buffer, in the order of their ids."""
        ids = np.concatenate([ids for ids, _ in rounds])
        order = np.argsort(ids)
        groups, member = np.divmod(ids[order], self.plan.repeat)
        self._state(step).slots[into.id] = np.searchsorted(self.groups(step), groups) * self.plan.repeat + member
        for f in fields:
            self.buffer.put(Key(step, into.id, f), select(concat([columns[f] for _, columns in rounds]), order))

    def close(self) -> None:
        self.buffer.close()


def _only_prompts(part: tuple[Ints, dict[str, Column]], prompts: Ints, repeat: int) -> tuple[Ints, dict[str, Column]]:
    """Returns the samples of these prompts; copies them, so that the memory of the others is released."""
    ids, columns = part
    index = np.flatnonzero(np.isin(ids // repeat, prompts))
    if len(index) == len(ids):
        return part
    return ids[index], {f: concat([select(c, index)]) for f, c in columns.items()}


def by_field(value: Any, writes: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns field → column. A node returns a dict of fields, a Batch, None, or the one column it writes."""
    if value is None:
        return {}
    if isinstance(value, Batch):
        return value.columns
    if isinstance(value, Mapping):
        return value
    if len(writes) == 1:
        return {writes[0]: value}
    fields = ", ".join(writes) or "(none)"
    raise DataError(f"returned a {type(value).__name__}; return a dict of the fields {fields}")
