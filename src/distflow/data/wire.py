"""Columns as bytes: what a rank sends to another is one contiguous segment, and is read back without a copy.

A segment of k samples and F fields is
    F × 32 bytes      schema: kind, dtype, number of trailing dimensions, the dimensions
    F × k × int32     lengths
    (padding to 16)
    the columns, widest elements first, so that each is aligned without padding between them
    (padding to 16)
Its size follows from k and the sizes of its samples alone, so a receiver knows it before the first byte arrives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.data import objects
from distflow.data.balance import Ints
from distflow.data.batch import Column, Ragged, stride_of
from distflow.data.copy_ranges import copy_runs
from distflow.errors import DataError

Kind = Literal["dense", "ragged"] | objects.Kind
KINDS: tuple[Kind, ...] = (*objects.KINDS, "dense", "ragged")
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SCHEMA_WORDS = 8  # int32: kind, dtype, dimensions, up to five sizes
MAX_TRAIL = SCHEMA_WORDS - 3
ALIGN = 16


@dataclass(frozen=True)
class Strip:
    """A column ready to be sent: flat elements, and where each sample's are."""

    kind: Kind
    values: Tensor  # [any], flat
    starts: Ints
    lengths: Ints
    trail: tuple[int, ...]

    @property
    def row(self) -> int:
        """Bytes per unit of length."""
        return stride_of(self.trail) * self.values.element_size()


def strip(column: Column, where: str, device: torch.device) -> Strip:
    """A column on the device it is sent from; `where` names the field in errors."""
    if isinstance(column, list):
        try:
            kind, data, lengths = objects.encode(column)
        except ValueError as e:  # a number of thousands of digits
            raise DataError(f"{where}: cannot travel: {e}; write it as text") from None
        return Strip(kind, torch.from_numpy(data).to(device), np.cumsum(lengths) - lengths, lengths, ())
    if isinstance(column, Ragged):
        made = Strip("ragged", column.values.to(device), column.starts, column.lengths, column.trail)
    else:
        ones = np.ones(len(column), np.int64)
        made = Strip("dense", column.to(device).reshape(-1), ones, ones, tuple(column.shape[1:]))
        made = replace(made, starts=np.arange(len(column), dtype=np.int64) * stride_of(made.trail))
    if made.values.dtype not in DTYPES:
        raise DataError(f"{where}: dtype {made.values.dtype} cannot travel; convert it first")
    if len(made.trail) > MAX_TRAIL:
        raise DataError(
            f"{where}: has {len(made.trail)} dimensions per row; at most {MAX_TRAIL} can travel, reshape it"
        )
    return made


@dataclass(frozen=True)
class Segments:
    """Consecutive samples by whom they go to or come from: `counts` samples each, at these byte `offsets`."""

    counts: Ints
    offsets: Ints

    def cuts(self) -> Ints:
        """Index of the first sample of each segment, and the number of all."""
        return np.concatenate(([0], np.cumsum(self.counts)))


def segment_size(fields: int, samples: int, payload: int) -> int:
    """Bytes of a segment; nothing at all is sent for no samples."""
    if not samples:
        return 0
    return int(_aligned(4 * fields * (SCHEMA_WORDS + samples)) + _aligned(payload))


def write(strips: Sequence[Strip], index: Ints, segments: Segments, out: Tensor) -> None:
    """Pack the samples `index`, segment after segment, into the bytes `out`."""
    lengths = np.stack([s.lengths[index] for s in strips])  # [fields, samples]
    rows = np.array([s.row for s in strips], np.int64)
    widths = np.array([s.values.element_size() for s in strips], np.int64)
    schema = np.zeros((len(strips), SCHEMA_WORDS), np.int32)
    for i, s in enumerate(strips):
        schema[i, :3] = KINDS.index(s.kind), DTYPES.index(s.values.dtype), len(s.trail)
        schema[i, 3 : 3 + len(s.trail)] = s.trail
    cuts = segments.cuts().tolist()
    for k, offset in enumerate(segments.offsets.tolist()):
        header = np.concatenate((schema.ravel(), lengths[:, cuts[k] : cuts[k + 1]].ravel()), dtype=np.int32)
        out[offset : offset + header.nbytes].copy_(torch.from_numpy(header.view(np.uint8)))
    starts = np.stack([s.starts[index] for s in strips]) * widths[:, None]
    places = _places(lengths, rows, widths, segments)
    copy_runs([s.values for s in strips], starts, out, places, lengths * rows[:, None])


def read(slab: Tensor, segments: Segments, fields: Sequence[str], order: Ints, where: str) -> Mapping[str, Column]:
    """The columns of all segments, in the given order of samples. Ragged columns are views of `slab`."""
    schemas, lengths = _headers(slab, segments, len(fields))
    _check_alike(schemas, fields, where)
    types = [_type_of(schema) for schema in schemas[0]]
    widths = np.array([dtype.itemsize for _, dtype, _ in types], np.int64)
    rows = np.array([stride_of(trail) for _, _, trail in types], np.int64) * widths
    places = _places(lengths, rows, widths, segments)[:, order]
    ordered = lengths[:, order]
    columns: dict[str, Column] = {}
    for i, (f, (kind, dtype, trail)) in enumerate(zip(fields, types, strict=True)):
        if kind in objects.KINDS:
            kinds = np.repeat(schemas[:, i, 0].astype(np.int64), segments.counts)[order]
            columns[f] = objects.decode(slab.cpu().numpy(), places[i], ordered[i], kinds)
        else:
            ragged = Ragged(slab.view(dtype), places[i] // widths[i], ordered[i], trail)
            columns[f] = ragged if kind == "ragged" else ragged.joined().clone()
    return columns


def _places(lengths: Ints, rows: Ints, widths: Ints, segments: Segments) -> Ints:
    """Byte position of every sample of every column, [fields, samples]: what `write` and `read` agree on."""
    fields = len(rows)
    if not lengths.size:
        return lengths
    sizes = lengths * rows[:, None]
    cuts = segments.cuts()
    ends = np.cumsum(sizes, axis=1)
    before = np.concatenate((np.zeros((fields, 1), np.int64), ends), axis=1)[:, cuts]  # bytes before each segment
    in_segment = np.diff(before, axis=1)  # [fields, segments]
    widest_first = np.argsort(-widths, kind="stable")
    base = np.empty_like(in_segment)
    base[widest_first] = np.cumsum(in_segment[widest_first], axis=0) - in_segment[widest_first]
    headers = 4 * fields * (SCHEMA_WORDS + segments.counts)
    base += segments.offsets + _aligned(headers)
    places: Ints = np.repeat(base - before[:, :-1], segments.counts, axis=1) + ends - sizes
    return places


def _headers(slab: Tensor, segments: Segments, fields: int) -> tuple[NDArray[np.int32], Ints]:
    """Schemas, [segments, fields, words], and lengths, [fields, samples]."""
    schemas = np.empty((len(segments.counts), fields, SCHEMA_WORDS), np.int32)
    lengths = np.empty((fields, int(segments.counts.sum())), np.int64)
    at = 0
    for k, (count, offset) in enumerate(zip(segments.counts.tolist(), segments.offsets.tolist(), strict=True)):
        size = fields * (SCHEMA_WORDS + count)
        header = slab[offset : offset + 4 * size].cpu().numpy().view(np.int32)
        schemas[k] = header[: fields * SCHEMA_WORDS].reshape(fields, SCHEMA_WORDS)
        lengths[:, at : at + count] = header[fields * SCHEMA_WORDS :].reshape(fields, count)
        at += count
    return schemas, lengths


def _check_alike(schemas: NDArray[np.int32], fields: Sequence[str], where: str) -> None:
    """All senders agree on the type of every field, Python objects being one type however they are written."""
    if (schemas == schemas[0]).all():
        return
    plain = len(objects.KINDS)  # kinds below this are Python objects
    for i, f in enumerate(fields):
        for other in schemas[1:, i]:
            first = schemas[0, i]
            if (first == other).all() or (first[0] < plain and other[0] < plain):
                continue
            raise DataError(
                f"{where}: field '{f}' is {_describe(first)} on one worker and {_describe(other)} on another;"
                " write the same type everywhere"
            )


def _type_of(schema: NDArray[np.int32]) -> tuple[Kind, torch.dtype, tuple[int, ...]]:
    kind, dtype, dims, *sizes = schema.tolist()
    return KINDS[kind], DTYPES[dtype], tuple(sizes[:dims])


def _describe(schema: NDArray[np.int32]) -> str:
    kind, dtype, trail = _type_of(schema)
    if kind in objects.KINDS:
        return "Python objects"
    return f"{kind} {str(dtype).removeprefix('torch.')}" + (f" {list(trail)}" if trail else "")


def _aligned(n: Any) -> Any:
    """Up to the next multiple of ALIGN; of a number or of many."""
    return -(-n // ALIGN) * ALIGN
