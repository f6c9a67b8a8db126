"""What a weight sync moves: FSDP cuts rows in even chunks, so the pieces for a column are a few intervals of givers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from distflow.weights.columns import Ints, Mask
from distflow.weights.shards import Shards, Spec, block_of


@dataclass(frozen=True)
class Cut:
    """What the parameters of a bucket have in common: so many rows, and tensor parallelism cuts `along` them, or not.

    Parameters that it does not cut at all are `replicated`. Of those, the target may all the same want a `block` of
    rows per column.
    """

    rows: int
    along: bool
    replicated: bool
    block: int | None = None

    @classmethod
    def of(cls, spec: Spec, target: Shards) -> "Cut":
        rows = spec.shape[0] if spec.shape else 1
        return cls(rows, spec.tp_dim == 0, spec.tp_dim is None, target.blocks.get(spec.name))


@dataclass(frozen=True)
class Part:
    """Rows [low, high) of what the givers of one tensor-parallel index have together, a chunk each, for one column."""

    tp_index: int
    chunk: int
    low: int
    high: int
    offset: int  # the first of their rows is this row of the column's

    @property
    def shards(self) -> range:
        return range(self.low // self.chunk, -(-self.high // self.chunk))

    @property
    def whole(self) -> range:
        """The shards of which the column wants all rows, of a whole chunk."""
        return range(-(-self.low // self.chunk), self.high // self.chunk)

    def rows(self, shard: int, window: tuple[int, int]) -> tuple[int, int]:
        """Returns which rows of a shard's chunk, of those in the window, the column wants."""
        first, (begin, end) = shard * self.chunk, window
        low = min(max(begin, self.low - first), end)
        return low, max(low, min(end, self.high - first))


@dataclass(frozen=True)
class Arrival:
    """Where the pieces of a part lie in the memory of a taker: those of whole shards, and the one or two others."""

    part: Part
    whole: Tensor
    edges: Sequence[tuple[int, int]]  # shard, position


@dataclass(frozen=True)
class Cuts:
    """How source and target cut parameters."""

    shard: int
    source_tp: int
    target_tp: int

    @classmethod
    def of(cls, source: Shards, target: Shards) -> "Cuts":
        return cls(source.shard, source.layout.tp, target.layout.tp)

    def chunk(self, cut: Cut) -> int:
        """Returns the rows of such parameters that a giver has, at most."""
        return -(-(cut.rows // self.source_tp if cut.along else cut.rows) // self.shard)

    def parts(self, cut: Cut, column: int, turn: int) -> tuple[Part, ...]:
        """Returns the parts that make up what a column wants of such parameters; none, if that is nothing.

        Replicas take turns in sending: with every `turn` it is another one, and columns begin with different ones.
        """
        chunk = self.chunk(cut)
        if not cut.along:
            one = (column + self.target_tp * turn) % self.source_tp
            indices = [one] if cut.replicated else list(self._overlapping(column))
            low, high = block_of(cut.rows, cut.block or cut.rows, column if cut.block else 0)
            return tuple(Part(t, chunk, low, high, -low) for t in indices if low < high)
        have, want = cut.rows // self.source_tp, cut.rows // self.target_tp
        first = column * want
        bounds = [(t, max(0, first - t * have), min(have, first + want - t * have)) for t in range(self.source_tp)]
        return tuple(Part(t, chunk, low, high, t * have - first) for t, low, high in bounds if low < high)

    def active(self, parts: Sequence[Part]) -> Mask:
        """Returns, for each giver, whether it has a piece."""
        active = np.zeros((self.shard, self.source_tp), bool)
        for part in parts:
            active[part.shards.start : part.shards.stop, part.tp_index] = True
        return active.reshape(-1)

    def arrival(self, part: Part, position: Ints, device: torch.device) -> Arrival:
        """Returns where the pieces of a part are, from the `position` of every giver's."""
        of_shards = position.reshape(self.shard, self.source_tp)[:, part.tp_index]
        edges = sorted({part.shards[0], part.shards[-1]} - set(part.whole))
        whole = torch.from_numpy(of_shards[part.whole.start : part.whole.stop].copy())
        return Arrival(part, whole.to(device), [(shard, int(of_shards[shard])) for shard in edges])

    def beside(self, size: int, column: int, tp_index: int) -> tuple[int, int, int]:
        """Returns what a giver and a column have in common of a dimension of this size, which is cut.

        Where it begins in the giver's tensor and in the column's, and how long it is.
        """
        have, want = (size // tp for tp in (self.source_tp, self.target_tp))
        low, high = max(tp_index * have, column * want), min((tp_index + 1) * have, (column + 1) * want)
        return low - tp_index * have, low - column * want, high - low

    def row_offsets(self, specs: Sequence[Spec], column: int) -> tuple[int, ...]:
        """Returns where each of some parameters begins in a piece of one row of all, in elements, and where it ends."""
        return tuple(accumulate((self._row(spec, column) for spec in specs), initial=0))

    def _row(self, spec: Spec, column: int) -> int:
        """Returns the elements of a row in a piece; all pieces for a column have room for the widest."""
        elements = prod(spec.shape[1:])
        if not spec.tp_dim:
            return elements
        size = spec.shape[spec.tp_dim]
        return elements // size * max(self.beside(size, column, t)[2] for t in self._overlapping(column))

    def _overlapping(self, column: int) -> range:
        """Returns the tensor-parallel indices of the source that have some of what a column wants."""
        first, end = column * self.source_tp, (column + 1) * self.source_tp
        return range(first // self.target_tp, -(-end // self.target_tp))


@dataclass(frozen=True, slots=True)  # there are thousands
class Segment:
    """One giver's pieces for a column: of each parameter of a bucket the rows of its chunk that are in the window.

    All pieces are as long as the window, also where the column wants fewer rows.
    """

    specs: Sequence[Spec]
    cuts: Cuts
    column: int
    window: tuple[int, int]
    row_offsets: Sequence[
        int
    ]  # where the parameters would begin in a window of one row, in elements; the last: its size

    @property
    def rows(self) -> int:
        return self.window[1] - self.window[0]

    @property
    def offsets(self) -> list[int]:
        """Where the pieces of each parameter begin, in elements."""
        return [self.rows * offset for offset in self.row_offsets[:-1]]

    @property
    def size(self) -> int:
        return self.rows * self.row_offsets[-1]

    def pack(self, part: Part, shard: int, held: Mapping[str, Tensor], memory: Tensor) -> None:
        """Writes the pieces of a giver, of this tensor-parallel index and shard, to `memory`."""
        begin, (low, high) = self.window[0], part.rows(shard, self.window)
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            given = self._given(spec, part, held[spec.name])
            self._pieces(memory, offset, given.shape[1:])[low - begin : high - begin].copy_(given[low:high])

    def keep(self, part: Part, shard: int, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> None:
        """Copies the pieces of a giver to where it wants them itself."""
        low, high = part.rows(shard, self.window)
        first = part.offset + shard * part.chunk
        for spec in self.specs:
            wanted = self._wanted(spec, part, filled[spec.name])
            wanted[first + low : first + high].copy_(self._given(spec, part, held[spec.name])[low:high])

    def take(self, part: Part, shard: int, memory: Tensor, filled: Mapping[str, Tensor]) -> None:
        """Reads the pieces of one giver from `memory` and writes them to where they are wanted."""
        begin, (low, high) = self.window[0], part.rows(shard, self.window)
        first = part.offset + shard * part.chunk
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            wanted = self._wanted(spec, part, filled[spec.name])
            pieces = self._pieces(memory, offset, wanted.shape[1:])
            wanted[first + low : first + high].copy_(pieces[low - begin : high - begin])

    def unpack(self, arrivals: Sequence[Arrival], data: Tensor, filled: Mapping[str, Tensor]) -> None:
        """Reads the segments of all givers, [givers, size], and writes them to where they are wanted."""
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            for arrival in arrivals:
                part, (begin, end) = arrival.part, self.window
                wanted = self._wanted(spec, part, filled[spec.name])
                pieces = self._pieces(data, offset, wanted.shape[1:])
                if part.whole:
                    first, last = (part.offset + part.chunk * shard for shard in (part.whole.start, part.whole.stop))
                    rows = wanted[first:last].unflatten(0, (-1, part.chunk))[:, begin:end]
                    torch.index_select(pieces, 0, arrival.whole, out=rows)
                for shard, position in arrival.edges:
                    low, high = part.rows(shard, self.window)
                    first = part.offset + part.chunk * shard
                    wanted[first + low : first + high].copy_(pieces[position, low - begin : high - begin])

    def _pieces(self, memory: Tensor, offset: int, row: tuple[int, ...]) -> Tensor:
        """Returns the pieces of a parameter, [..., window, *row], in the memory of segments, [..., size]."""
        pieces: Tensor = memory[..., offset : offset + self.rows * prod(row)].unflatten(-1, (self.rows, *row))
        return pieces

    def _given(self, spec: Spec, part: Part, tensor: Tensor) -> Tensor:
        """Returns what of a giver's tensor the column wants, but for rows."""
        if spec.tp_dim:
            begin, _, length = self.cuts.beside(spec.shape[spec.tp_dim], self.column, part.tp_index)
            return tensor.narrow(spec.tp_dim, begin, length)
        return tensor if spec.shape else tensor.view(1)

    def _wanted(self, spec: Spec, part: Part, tensor: Tensor) -> Tensor:
        """Returns the place of it in the tensor of a taker."""
        if spec.tp_dim:
            _, begin, length = self.cuts.beside(spec.shape[spec.tp_dim], self.column, part.tp_index)
            return tensor.narrow(spec.tp_dim, begin, length)
        return tensor if spec.shape else tensor.view(1)
