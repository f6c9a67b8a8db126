"""The Data Coordinator of one worker: loads, keeps, moves and frees the fields of its chain. No shared actor."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.balance import Ints
from distflow.data.batch import Batch, Column, Ragged, as_column, join, own_copy, select, stride_of
from distflow.data.buffer import Buffer, Key
from distflow.data.dynamic_sampling import DynamicSampling, SampledPrompts
from distflow.data.exchange import AllGather, Collective, Slabs, exchange
from distflow.data.loader import Loader
from distflow.data.routes import contiguous
from distflow.errors import DataError, cut, suggest
from distflow.plan.tasks import Free, Load, Move, Partition, Plan, Refill, Run


@dataclass
class Traffic:
    """What went over this worker's data plane in one step. Bytes, but for `imbalance`: (max − min) / mean tokens."""

    sent: int = 0
    received: int = 0
    local: int = 0
    imbalance: float | None = None


class Coordinator:
    """Errors of `outputs` say what is wrong with what a node returned; the worker adds which node, step and rank."""

    def __init__(self, rank: int, plan: Plan, loader: Loader, device: torch.device | None = None) -> None:
        self.rank, self.plan, self.loader = rank, plan, loader
        self.buffer = Buffer()
        self.slabs = Slabs(device)
        self.traffic = Traffic()
        self._slots: dict[tuple[int, str], Ints] = {}  # (step, partition) → the slots this rank has there
        self._moved: set[Key] = set()  # columns that came by a move, not from a node here
        self.position = 0  # in the stream of prompts, where the next step begins, if the plan has a refill
        self._draw: DynamicSampling | None = None  # while prompts are being drawn
        self.drawn: SampledPrompts | None = None  # the prompts of the step, afterwards
        self._stash: dict[str, list[tuple[Ints, dict[str, Column]]]] = {}  # partition → what the rounds have brought

    def load(self, step: int, task: Load) -> None:
        """Take what was loaded behind the last step, and start loading the next one."""
        layout = task.partition.layout
        cell = layout.cell_of(self.rank)
        assert cell is not None
        if self._draw:
            ids, columns = self.loader.draw(self._draw.position, self._draw.count, cell, layout.dp)
        else:
            ids, columns = self.loader.load(step, cell, layout.dp)
            self.loader.prefetch(step + 1, cell, layout.dp)
        self._slots[step, task.partition.id] = ids - self.groups(step)[0] * self.plan.repeat
        for f in task.fields:
            self.buffer.put(Key(step, task.partition.id, f), as_column(columns[f], len(ids), f"data column '{f}'"))

    def move(self, step: int, task: Move) -> Generator[Collective, Tensor, None]:
        src, dst = task.src, task.dst
        held = None
        if src.layout.cell_of(self.rank) is not None:
            held = self.slots(step, src), {f: self.buffer.get(Key(step, src.id, f)) for f in task.fields}
        wanted = None
        if not task.deals and dst.layout.cell_of(self.rank) is not None:
            wanted = self.slots(step, dst)
        samples = len(self.groups(step)) * self.plan.repeat
        moved = yield from exchange(self.rank, task, samples, self.plan.repeat, held, wanted, self.slabs)
        self.traffic.sent += moved.sent
        self.traffic.received += moved.received
        self.traffic.local += moved.kept
        if moved.imbalance is not None:
            self.traffic.imbalance = max(moved.imbalance, self.traffic.imbalance or 0.0)
        if dst.layout.cell_of(self.rank) is not None:
            self._slots[step, dst.id] = moved.slots
            for f, column in moved.columns.items():
                self.buffer.put(Key(step, dst.id, f), column)
                self._moved.add(Key(step, dst.id, f))

    def inputs(self, step: int, task: Run) -> Batch:
        """What a node reads. Tensors are shared with other readers and must not be changed; objects are its own."""
        groups, place = np.divmod(self.slots(step, task.partition), self.plan.repeat)
        ids = self.groups(step)[groups] * self.plan.repeat + place
        columns: dict[str, Column] = {}
        for f in task.reads:
            key = Key(step, task.partition.id, f)
            column = self.buffer.get(key)
            if key not in self._moved:
                self.traffic.local += size_of(column)
            columns[f] = own_copy(column) if isinstance(column, list) else column
        return Batch(ids, ids // self.plan.repeat, columns)

    def outputs(self, step: int, task: Run, value: Any) -> None:
        """Keep what a node returned, as far as somebody reads it."""
        node = self.plan.flow.node(task.node)
        samples = len(self.slots(step, task.partition))
        written = _by_field(value, node.writes)
        for f in written:
            if f not in node.writes:
                raise DataError(f"returned field '{cut(str(f))}', which it does not declare{suggest(f, node.writes)}")
        for f in task.writes:
            if f not in written:
                readers = "', '".join(self.plan.flow.readers[f])
                raise DataError(f"returned no field '{f}', which '{readers}' reads")
            column = as_column(written[f], samples, f"field '{f}'")
            self.buffer.put(Key(step, task.partition.id, f), column)

    def free(self, step: int, task: Free) -> None:
        self.buffer.free(step, task.partition.id, task.fields)
        self._moved.difference_update([Key(step, task.partition.id, f) for f in task.fields])

    def end(self, step: int) -> Traffic:
        """Close the books of a step: every field has had its last reader."""
        left = self.buffer.left(step)
        if left:
            raise DataError(f"step {step} is over, but these fields were never freed: {left}")
        self._slots = {k: v for k, v in self._slots.items() if k[0] != step}
        self.drawn = None
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def slots(self, step: int, partition: Partition) -> Ints:
        """The slots this rank has in a partition; one that nothing was moved to is dealt in contiguous runs."""
        key = step, partition.id
        if key not in self._slots:
            cells = contiguous(len(self.groups(step)) * self.plan.repeat, partition.layout.dp)
            self._slots[key] = np.flatnonzero(cells == partition.layout.cell_of(self.rank))
        return self._slots[key]

    def groups(self, step: int) -> Ints:
        """The prompts of a step, ascending; while prompts are drawn, those of the present round."""
        if self.drawn:
            return self.drawn.positions
        first, count = step * self.loader.prompts, self.loader.prompts
        if self._draw:
            first, count = self._draw.position, self._draw.count
        return np.arange(first, first + count, dtype=np.int64)

    def begin(self, task: Refill) -> None:
        """Before the first round of a step."""
        self._draw = DynamicSampling(self.position, self.loader.prompts, task.rounds, task.unit)

    def refill(self, step: int, task: Refill) -> Generator[Collective, Tensor, bool]:
        """Keep what a round has brought; False if there has to be another one."""
        assert self._draw is not None
        keep = yield from self._keep(step, task)
        prompts = self.groups(step)
        full = self._draw.add(keep)
        for src, _, fields in task.carried:
            if src.layout.cell_of(self.rank) is not None:
                groups, place = np.divmod(self.slots(step, src), self.plan.repeat)
                columns = {f: self.buffer.pop(Key(step, src.id, f)) for f in fields}
                rounds = self._stash.setdefault(src.id, [])
                rounds.append((prompts[groups] * self.plan.repeat + place, columns))
                useful = self._draw.useful()
                self._stash[src.id] = [_only(part, useful, self.plan.repeat) for part in rounds]
        self.buffer.drop(Key(step, task.partition.id, task.field))  # if nobody has it who reads it later
        self._slots = {k: v for k, v in self._slots.items() if k[0] != step}
        self._moved.clear()
        if full:
            self.drawn, self._draw = self._draw.result(), None
            self.position = self.drawn.next
            for src, dst, fields in task.carried:
                if src.layout.cell_of(self.rank) is not None:
                    self._put_together(step, dst, fields, self._stash.pop(src.id))
        return full

    def _keep(self, step: int, task: Refill) -> Generator[Collective, Tensor, Any]:
        """Of every prompt of the round, whether all of its samples are to be kept."""
        layout, samples = task.partition.layout, len(self.groups(step)) * self.plan.repeat
        told = torch.full((-(-samples // layout.dp),), -1, dtype=torch.int32)
        if layout.cell_of(self.rank) is not None:
            column = self.buffer.get(Key(step, task.partition.id, task.field))
            if isinstance(column, Ragged) or len(torch.as_tensor(column).shape) != 1:
                raise DataError(f"node '{task.node}': field '{task.field}' is not one truth value per sample")
            slots = torch.from_numpy(self.slots(step, task.partition))
            told[: len(slots)] = 2 * slots + torch.as_tensor(column).bool()
        everybody = (yield AllGather(task.ranks, told)).cpu().flatten()
        known = everybody[everybody >= 0].numpy()
        keep = np.ones(samples, bool)
        keep[known // 2] = known % 2
        return keep.reshape(-1, self.plan.repeat).all(1)

    def _put_together(
        self, step: int, into: Partition, fields: tuple[str, ...], rounds: list[tuple[Ints, dict[str, Column]]]
    ) -> None:
        ids = np.concatenate([ids for ids, _ in rounds])
        order = np.argsort(ids)
        groups, place = np.divmod(ids[order], self.plan.repeat)
        self._slots[step, into.id] = np.searchsorted(self.groups(step), groups) * self.plan.repeat + place
        for f in fields:
            self.buffer.put(Key(step, into.id, f), select(join([columns[f] for _, columns in rounds]), order))

    def close(self) -> None:
        self.buffer.close()


def _only(part: tuple[Ints, dict[str, Column]], prompts: Ints, repeat: int) -> tuple[Ints, dict[str, Column]]:
    """What belongs to these prompts; the memory of the rest is given back."""
    ids, columns = part
    index = np.flatnonzero(np.isin(ids // repeat, prompts))
    if len(index) == len(ids):
        return part
    return ids[index], {f: join([select(c, index)]) for f, c in columns.items()}


def size_of(column: Column) -> int:
    """Bytes; of Python objects only text counts."""
    if isinstance(column, Ragged):
        return int(column.lengths.sum()) * stride_of(column.trail) * column.values.element_size()
    if isinstance(column, Tensor):
        return column.nbytes
    return sum(len(v) for v in column if type(v) is str)


def _by_field(value: Any, writes: tuple[str, ...]) -> Mapping[str, Any]:
    """A node returns a dict of fields, a Batch, nothing, or the one column it writes."""
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
