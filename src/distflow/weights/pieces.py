"""The pieces that a weight sync moves: FSDP cuts rows in even chunks, so a dp group wants a few intervals of shards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from distflow.util.arrays import Ints
from distflow.weights.shards import Shards, TensorSpec, block_of
from distflow.weights.sync_group import Mask


@dataclass(frozen=True)
class Sharding:
    """The cuts of the parameters of a bucket; all of them have `rows` rows."""

    rows: int
    along: bool  # tensor parallelism cuts the rows, which FSDP cuts too
    replicated: bool  # tensor parallelism does not cut them
    block: int | None = None  # rows per tensor-parallel rank of the destination, where only that cuts them

    @classmethod
    def of(cls, spec: TensorSpec, destination: Shards) -> "Sharding":
        rows = spec.shape[0] if spec.shape else 1
        return cls(rows, spec.tp_dim == 0, spec.tp_dim is None, destination.blocks.get(spec.name))


@dataclass(frozen=True)
class Part:
    """Rows [low, high) of the source's shards with one tensor-parallel rank, a chunk of rows each, for one dp group."""

    source_tp_rank: int
    chunk: int
    low: int
    high: int
    offset: int  # the first row of these shards is this row of the destination

    @property
    def shards(self) -> range:
        return range(self.low // self.chunk, -(-self.high // self.chunk))

    @property
    def whole(self) -> range:
        """Returns the shards of which the dp group wants a whole chunk."""
        return range(-(-self.low // self.chunk), self.high // self.chunk)

    def rows(self, shard: int, window: tuple[int, int]) -> tuple[int, int]:
        """Returns the rows of a shard's chunk, within the window, that the dp group wants."""
        first, (begin, end) = shard * self.chunk, window
        low = min(max(begin, self.low - first), end)
        return low, max(low, min(end, self.high - first))


@dataclass(frozen=True)
class GatheredPart:
    """The places of a part's pieces in the buffer of a destination rank: of whole shards, and the one or two others."""

    part: Part
    whole: Tensor
    edges: Sequence[tuple[int, int]]  # shard, position


@dataclass(frozen=True)
class Resharding:
    """The cuts of parameters at source and destination."""

    shard: int
    source_tp: int
    destination_tp: int

    @classmethod
    def of(cls, source: Shards, destination: Shards) -> "Resharding":
        return cls(source.shard, source.layout.tp, destination.layout.tp)

    def chunk(self, sharding: Sharding) -> int:
        """Returns the rows of such parameters that a source rank has, at most."""
        return -(-(sharding.rows // self.source_tp if sharding.along else sharding.rows) // self.shard)

    def parts(self, sharding: Sharding, tp_rank: int, bucket: int) -> tuple[Part, ...]:
        """Returns the parts that a tensor-parallel rank of the destination needs of such parameters; maybe none.

        Replicated parameters come from another source rank with every `bucket`, beginning at a different one for each
        `tp_rank`.
        """
        chunk = self.chunk(sharding)
        if not sharding.along:
            one = (tp_rank + self.destination_tp * bucket) % self.source_tp
            ranks = [one] if sharding.replicated else list(self._overlapping(tp_rank))
            low, high = block_of(sharding.rows, sharding.block or sharding.rows, tp_rank if sharding.block else 0)
            return tuple(Part(t, chunk, low, high, -low) for t in ranks if low < high)
        have, want = sharding.rows // self.source_tp, sharding.rows // self.destination_tp
        first = tp_rank * want
        bounds = [(t, max(0, first - t * have), min(have, first + want - t * have)) for t in range(self.source_tp)]
        return tuple(Part(t, chunk, low, high, t * have - first) for t, low, high in bounds if low < high)

    def active(self, parts: Sequence[Part]) -> Mask:
        """Returns, for each source rank, whether it has a piece."""
        active = np.zeros((self.shard, self.source_tp), bool)
        for part in parts:
            active[part.shards.start : part.shards.stop, part.source_tp_rank] = True
        return active.reshape(-1)

    def gathered(self, part: Part, position: Ints, device: torch.device) -> GatheredPart:
        """Returns where the pieces of a part are, given the `position` of the piece of every source rank."""
        of_shards = position.reshape(self.shard, self.source_tp)[:, part.source_tp_rank]
        edges = sorted({part.shards[0], part.shards[-1]} - set(part.whole))
        whole = torch.from_numpy(of_shards[part.whole.start : part.whole.stop].copy())
        return GatheredPart(part, whole.to(device), [(shard, int(of_shards[shard])) for shard in edges])

    def tp_overlap(self, size: int, source_tp_rank: int, tp_rank: int) -> tuple[int, int, int]:
        """Returns the overlap of two tensor-parallel ranks in a dimension of this size, which both layouts cut.

        The numbers are its start in the source's tensor, its start in the destination's tensor and its length.
        """
        have, want = (size // tp for tp in (self.source_tp, self.destination_tp))
        low = max(source_tp_rank * have, tp_rank * want)
        high = min((source_tp_rank + 1) * have, (tp_rank + 1) * want)
        return low - source_tp_rank * have, low - tp_rank * want, high - low

    def row_offsets(self, specs: Sequence[TensorSpec], tp_rank: int) -> tuple[int, ...]:
        """Returns the offsets of parameters in a piece with one row of each, in elements, and its size."""
        return tuple(accumulate((self._row(spec, tp_rank) for spec in specs), initial=0))

    def _row(self, spec: TensorSpec, tp_rank: int) -> int:
        """Returns the elements of a row in a piece; all pieces for a dp group have room for the widest."""
        elements = prod(spec.shape[1:])
        if not spec.tp_dim:
            return elements
        size = spec.shape[spec.tp_dim]
        return elements // size * max(self.tp_overlap(size, t, tp_rank)[2] for t in self._overlapping(tp_rank))

    def _overlapping(self, tp_rank: int) -> range:
        """Returns the source's tensor-parallel ranks that overlap one of the destination."""
        first, end = tp_rank * self.source_tp, (tp_rank + 1) * self.source_tp
        return range(first // self.destination_tp, -(-end // self.destination_tp))


@dataclass(frozen=True, slots=True)  # there are thousands
class PieceFormat:
    """The memory layout of a source rank's piece of a bucket: of each parameter, the rows of its chunk in the window.

    All pieces are as long as the window, also where the dp group wants fewer rows.
    """

    specs: Sequence[TensorSpec]
    dtype: torch.dtype
    resharding: Resharding
    tp_rank: int  # of the destination
    window: tuple[int, int]
    row_offsets: Sequence[int]  # of the parameters in a window of one row, in elements, and its size

    @property
    def rows(self) -> int:
        return self.window[1] - self.window[0]

    @property
    def offsets(self) -> list[int]:
        """Returns the offset of each parameter in a piece, in elements."""
        return [self.rows * offset for offset in self.row_offsets[:-1]]

    @property
    def bytes(self) -> int:
        return self.rows * self.row_offsets[-1] * self.dtype.itemsize

    def pack(self, part: Part, shard: int, held: Mapping[str, Tensor], memory: Tensor) -> None:
        """Writes the piece of the source rank with this shard to `memory`, uint8."""
        memory, begin, (low, high) = memory.view(self.dtype), self.window[0], part.rows(shard, self.window)
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            given = self._source_view(spec, part, held[spec.name])
            rows = self._rows_of(memory, offset, given.shape[1:])
            rows[low - begin : high - begin].copy_(given[low:high])

    def copy(self, part: Part, shard: int, held: Mapping[str, Tensor], filled: Mapping[str, Tensor]) -> None:
        """Copies the rows that a source rank, which is also a destination rank, needs itself."""
        low, high = part.rows(shard, self.window)
        first = part.offset + shard * part.chunk
        for spec in self.specs:
            into = self._destination_view(spec, part, filled[spec.name])
            into[first + low : first + high].copy_(self._source_view(spec, part, held[spec.name])[low:high])

    def unpack(self, part: Part, shard: int, memory: Tensor, filled: Mapping[str, Tensor]) -> None:
        """Reads the piece of one source rank from `memory`, uint8, into the destination's parameters."""
        memory, begin, (low, high) = memory.view(self.dtype), self.window[0], part.rows(shard, self.window)
        first = part.offset + shard * part.chunk
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            into = self._destination_view(spec, part, filled[spec.name])
            rows = self._rows_of(memory, offset, into.shape[1:])
            into[first + low : first + high].copy_(rows[low - begin : high - begin])

    def unpack_all(self, parts: Sequence[GatheredPart], memory: Tensor, filled: Mapping[str, Tensor]) -> None:
        """Reads the pieces of all source ranks, [pieces, bytes], into the destination's parameters."""
        memory, (begin, end) = memory.view(self.dtype), self.window
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            for gathered in parts:
                part = gathered.part
                into = self._destination_view(spec, part, filled[spec.name])
                pieces = self._rows_of(memory, offset, into.shape[1:])
                if part.whole:
                    first, last = (part.offset + part.chunk * shard for shard in (part.whole.start, part.whole.stop))
                    rows = into[first:last].unflatten(0, (-1, part.chunk))[:, begin:end]
                    torch.index_select(pieces, 0, gathered.whole, out=rows)
                for shard, position in gathered.edges:
                    low, high = part.rows(shard, self.window)
                    first = part.offset + part.chunk * shard
                    into[first + low : first + high].copy_(pieces[position, low - begin : high - begin])

    def _rows_of(self, memory: Tensor, offset: int, row: tuple[int, ...]) -> Tensor:
        """Returns the rows of a parameter, [..., window, *row], in pieces, [..., elements]."""
        rows: Tensor = memory[..., offset : offset + self.rows * prod(row)].unflatten(-1, (self.rows, *row))
        return rows

    def _source_view(self, spec: TensorSpec, part: Part, tensor: Tensor) -> Tensor:
        """Returns the slice of a source rank's tensor that the dp group needs, with all rows."""
        if spec.tp_dim:
            begin, _, length = self.resharding.tp_overlap(spec.shape[spec.tp_dim], part.source_tp_rank, self.tp_rank)
            return tensor.narrow(spec.tp_dim, begin, length)
        return tensor if spec.shape else tensor.view(1)

    def _destination_view(self, spec: TensorSpec, part: Part, tensor: Tensor) -> Tensor:
        """Returns the slice of a destination rank's tensor that the part fills, with all rows."""
        if spec.tp_dim:
            _, begin, length = self.resharding.tp_overlap(spec.shape[spec.tp_dim], part.source_tp_rank, self.tp_rank)
            return tensor.narrow(spec.tp_dim, begin, length)
        return tensor if spec.shape else tensor.view(1)
