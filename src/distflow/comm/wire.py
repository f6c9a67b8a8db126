"""The wire format: a message to a rank is one contiguous segment, which is read without a copy.

A segment of k samples and F fields consists of
    F × 32 bytes      schema: kind, dtype, number of item dimensions, the dimensions
    F × k × int32     lengths
    (padding to 16)
    the columns, widest elements first, so that each is aligned without padding between them
    (padding to 16)
Its size depends only on k and the sizes of its samples, so a receiver knows it before the first byte arrives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.batch.batch import Column, Ragged
from distflow.batch.copy_ranges import SHORT, copy_ranges
from distflow.comm import objects
from distflow.errors import DataError
from distflow.util.arrays import Ints

Kind = Literal["dense", "ragged"] | objects.Kind
KINDS: tuple[Kind, ...] = (*objects.KINDS, "dense", "ragged")
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SCHEMA_WORDS = 8  # int32: kind, dtype, dimensions, up to five sizes
MAX_ITEM_DIMS = SCHEMA_WORDS - 3
ALIGN = 16


@dataclass(frozen=True)
class FlatColumn:
    """A column ready to be packed: flat elements, and the start and length of each sample."""

    kind: Kind
    values: Tensor  # [elements]
    starts: Ints  # in elements
    lengths: Ints  # in items
    item_shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return prod(self.item_shape) * self.values.element_size()


def flatten(column: Column, where: str) -> FlatColumn:
    """Converts a column for sending; `where` names the field in errors."""
    if isinstance(column, list):
        try:
            kind, data, lengths = objects.encode(column)
        except ValueError as e:  # an integer of thousands of digits
            raise DataError(f"{where}: cannot be sent: {e}; write it as text") from None
        return FlatColumn(kind, torch.from_numpy(data), np.cumsum(lengths) - lengths, lengths, ())
    if isinstance(column, Ragged):
        flat = FlatColumn("ragged", column.values, column.starts, column.lengths, column.item_shape)
    else:
        n, item_shape = len(column), tuple(column.shape[1:])
        starts = np.arange(n, dtype=np.int64) * prod(item_shape)
        flat = FlatColumn("dense", column.reshape(-1), starts, np.ones(n, np.int64), item_shape)
    if flat.values.dtype not in DTYPES:
        raise DataError(f"{where}: dtype {flat.values.dtype} cannot be sent; convert it first")
    if len(flat.item_shape) > MAX_ITEM_DIMS:
        raise DataError(
            f"{where}: has {len(flat.item_shape)} dimensions per item; at most {MAX_ITEM_DIMS} can be sent, reshape it"
        )
    return flat


@dataclass(frozen=True)
class Segments:
    """Consecutive samples, one segment per peer: the number of samples and the byte offset of each."""

    counts: Ints
    offsets: Ints

    def bounds(self) -> Ints:
        """Returns the index of the first sample of each segment, and the number of all samples."""
        return np.concatenate(([0], np.cumsum(self.counts)))


def segment_size(fields: int, samples: int, payload: int) -> int:
    """Returns the bytes of a segment, 0 without samples."""
    if not samples:
        return 0
    return int(_aligned(4 * fields * (SCHEMA_WORDS + samples)) + _aligned(payload))


class Packing:
    """Samples of some columns, segment after segment, as they are sent: all bytes, or those of a segment in pieces."""

    def __init__(self, columns: Sequence[FlatColumn], index: Ints, segments: Segments) -> None:
        self._columns, self._segments = columns, segments
        self._lengths = np.stack([c.lengths[index] for c in columns])  # [fields, samples]
        item_bytes = np.array([c.item_bytes for c in columns], np.int64)
        widths = np.array([c.values.element_size() for c in columns], np.int64)
        self._starts = np.stack([c.starts[index] for c in columns]) * widths[:, None]
        self._sizes = self._lengths * item_bytes[:, None]
        self._offsets = _offsets(self._lengths, item_bytes, widths, segments)
        self._bounds = segments.bounds().tolist()
        self._schema = np.zeros((len(columns), SCHEMA_WORDS), np.int32)
        for i, c in enumerate(columns):
            self._schema[i, :3] = KINDS.index(c.kind), DTYPES.index(c.values.dtype), len(c.item_shape)
            self._schema[i, 3 : 3 + len(c.item_shape)] = c.item_shape

    @property
    def in_long_ranges(self) -> bool:
        """Whether a sample's values in a column are so many, on average, that each is worth a piece of its own."""
        return int(self._sizes.sum()) >= SHORT * self._sizes.size

    def write(self, out: Tensor) -> None:
        """Copies all bytes to `out`."""
        for k, offset in enumerate(self._segments.offsets.tolist()):
            header = self._header(k)
            out[offset : offset + len(header)].copy_(torch.from_numpy(header))
        copy_ranges([c.values for c in self._columns], self._starts, out, self._offsets, self._sizes)

    def pieces(self, segment: int) -> list[memoryview]:
        """Returns the bytes of a segment in order, as views of the columns wherever they are theirs."""
        samples = slice(self._bounds[segment], self._bounds[segment + 1])
        offset, size, start = (x[:, samples].ravel() for x in (self._offsets, self._sizes, self._starts))
        column = np.repeat(np.arange(len(self._columns)), samples.stop - samples.start)
        order = np.argsort(offset, kind="stable")  # that of the columns, the widest first
        order = order[size[order] > 0]
        column, start, end = column[order], start[order], (start + size)[order]
        apart = np.flatnonzero((column[1:] != column[:-1]) | (start[1:] != end[:-1]))  # others are adjacent
        first, last = np.concatenate(([0], apart + 1)), np.append(apart, len(order) - 1)
        values = [c.values.view(torch.uint8).numpy().data for c in self._columns]
        pieces = [self._header(segment).data]
        if len(order):
            ranges = zip(column[first].tolist(), start[first].tolist(), end[last].tolist(), strict=True)
            pieces += [values[c][a:b] for c, a, b in ranges]
        if padding := -int(size.sum()) % ALIGN:
            pieces.append(memoryview(bytes(padding)))
        return pieces

    def _header(self, segment: int) -> NDArray[np.uint8]:
        """Returns schema and lengths of a segment, with the padding behind them."""
        lengths = self._lengths[:, self._bounds[segment] : self._bounds[segment + 1]]
        header = np.zeros(_aligned(4 * (self._schema.size + lengths.size)) // 4, np.int32)
        header[: self._schema.size] = self._schema.ravel()
        header[self._schema.size : self._schema.size + lengths.size] = lengths.ravel()
        return header.view(np.uint8)


def pack(columns: Sequence[FlatColumn], index: Ints, segments: Segments, out: Tensor) -> None:
    """Packs the samples `index`, segment after segment, into the bytes `out`."""
    Packing(columns, index, segments).write(out)


def unpack(memory: Tensor, segments: Segments, fields: Sequence[str], order: Ints, where: str) -> Mapping[str, Column]:
    """Returns the columns of all segments, in the given order of samples. Ragged columns are views of `memory`."""
    schemas, lengths = _headers(memory, segments, len(fields))
    _check_alike(schemas, fields, where)
    types = [_type_of(schema) for schema in schemas[0]]
    widths = np.array([dtype.itemsize for _, dtype, _ in types], np.int64)
    item_bytes = np.array([prod(item_shape) for _, _, item_shape in types], np.int64) * widths
    offsets = _offsets(lengths, item_bytes, widths, segments)[:, order]
    ordered = lengths[:, order]
    columns: dict[str, Column] = {}
    for i, (f, (kind, dtype, item_shape)) in enumerate(zip(fields, types, strict=True)):
        if kind in objects.KINDS:
            kinds = np.repeat(schemas[:, i, 0].astype(np.int64), segments.counts)[order]
            columns[f] = objects.decode(memory.numpy(), offsets[i], ordered[i], kinds)
        else:
            ragged = Ragged(memory.view(dtype), offsets[i] // widths[i], ordered[i], item_shape)
            columns[f] = ragged if kind == "ragged" else ragged.joined().clone()
    return columns


def _offsets(lengths: Ints, item_bytes: Ints, widths: Ints, segments: Segments) -> Ints:
    """Returns the byte offset of every sample of every column, [fields, samples]: the layout of a segment's payload."""
    fields = len(item_bytes)
    if not lengths.size:
        return lengths
    sizes = lengths * item_bytes[:, None]
    ends = np.cumsum(sizes, axis=1)
    before = np.concatenate((np.zeros((fields, 1), np.int64), ends), axis=1)[:, segments.bounds()]  # each segment
    in_segment = np.diff(before, axis=1)  # [fields, segments]
    widest_first = np.argsort(-widths, kind="stable")
    base = np.empty_like(in_segment)
    base[widest_first] = np.cumsum(in_segment[widest_first], axis=0) - in_segment[widest_first]
    headers = 4 * fields * (SCHEMA_WORDS + segments.counts)
    base += segments.offsets + _aligned(headers)
    offsets: Ints = np.repeat(base - before[:, :-1], segments.counts, axis=1) + ends - sizes
    return offsets


def _headers(memory: Tensor, segments: Segments, fields: int) -> tuple[NDArray[np.int32], Ints]:
    """Returns schemas, [segments, fields, words], and lengths, [fields, samples]."""
    schemas = np.empty((len(segments.counts), fields, SCHEMA_WORDS), np.int32)
    lengths = np.empty((fields, int(segments.counts.sum())), np.int64)
    at = 0
    for k, (count, offset) in enumerate(zip(segments.counts.tolist(), segments.offsets.tolist(), strict=True)):
        size = fields * (SCHEMA_WORDS + count)
        header = memory[offset : offset + 4 * size].numpy().view(np.int32)
        schemas[k] = header[: fields * SCHEMA_WORDS].reshape(fields, SCHEMA_WORDS)
        lengths[:, at : at + count] = header[fields * SCHEMA_WORDS :].reshape(fields, count)
        at += count
    return schemas, lengths


def _check_alike(schemas: NDArray[np.int32], fields: Sequence[str], where: str) -> None:
    """Checks that all senders agree on the type of every field; Python objects are one type in any encoding."""
    if (schemas == schemas[0]).all():
        return
    first_tensor = len(objects.KINDS)  # kinds below this are Python objects
    for i, f in enumerate(fields):
        for other in schemas[1:, i]:
            first = schemas[0, i]
            if (first == other).all() or (first[0] < first_tensor and other[0] < first_tensor):
                continue
            raise DataError(
                f"{where}: field '{f}' is {_describe(first)} on one worker and {_describe(other)} on another;"
                " write the same type everywhere"
            )


def _type_of(schema: NDArray[np.int32]) -> tuple[Kind, torch.dtype, tuple[int, ...]]:
    kind, dtype, dims, *sizes = schema.tolist()
    return KINDS[kind], DTYPES[dtype], tuple(sizes[:dims])


def _describe(schema: NDArray[np.int32]) -> str:
    kind, dtype, item_shape = _type_of(schema)
    if kind in objects.KINDS:
        return "Python objects"
    return f"{kind} {str(dtype).removeprefix('torch.')}" + (f" {list(item_shape)}" if item_shape else "")


def _aligned(n: Any) -> Any:
    """Rounds a number or an array up to multiples of ALIGN."""
    return -(-n // ALIGN) * ALIGN
